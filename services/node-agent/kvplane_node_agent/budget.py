"""How much memory the KV cache has."""

from collections.abc import Iterable

from kvplane_node_agent.engines.base import EngineModel

_SHARE_OF_FREE_MEMORY = 0.9


def kv_budget_bytes(
    operator_bytes: int | None,
    models: Iterable[EngineModel],
    free_bytes: int | None,
    block_bytes: int,
) -> int | None:
    """Return the KV budget in bytes, or None for unknown.

    It is the operator's word, else what the engine has allocated, else a share of `free_bytes`,
    the GPUs' free memory. The engine's slots are rounded up to whole blocks, so that every one of
    them can be full at once.
    """
    if operator_bytes is not None:
        return operator_bytes
    allocated = [_slots_bytes(model, block_bytes) for model in models if model.loaded]
    if allocated and None not in allocated:
        return sum(bytes_ for bytes_ in allocated if bytes_ is not None)
    return None if free_bytes is None else int(free_bytes * _SHARE_OF_FREE_MEMORY)


def _slots_bytes(model: EngineModel, block_bytes: int) -> int | None:
    if model.context_tokens is None or model.kv_bytes_per_token is None:
        return None
    slot_bytes = int(model.context_tokens * model.kv_bytes_per_token)
    return model.slots * -(-slot_bytes // block_bytes) * block_bytes
