"""Why a node is out of the question, and what to tell the caller when every node is."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvplane_common.errors import (
    ContextExceededError,
    DeadlineUnreachableError,
    EngineUnavailableError,
    ExhaustedError,
    KvBlocksBusyError,
    KvBudgetExceededError,
    KvplaneError,
    ModelNotFoundError,
    NodeDrainingError,
    NodesDrainingError,
    NoNodesError,
    QueueFullError,
    UnavailableError,
)
from kvplane_router.costs import Candidate, Need, Rates
from kvplane_router.fleet import Fleet, Model, Node

PROBE_MS = 10_000
"""How often a request is let through although every node is expected to miss its deadline: rates
that were once measured too slow would never be measured again."""

_LOOK_AGAIN_MS = 1_000
"""Both the watch of an engine and that of the registry look again about every second."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a request brings to every node."""

    model: str
    need: Need
    tried: Mapping[str, KvplaneError]
    """Nodes that have failed or refused this request, with what they said."""
    outgrown_tokens: int
    """The greatest context that was too small, as a node told. 0: none."""
    typical: Rates
    left_ms: float | None
    """Time to the caller's deadline. None: there is none."""


def case(
    fleet: Fleet,
    model: str,
    need: Need,
    tried: Mapping[str, KvplaneError],
    typical: Rates,
    left_ms: float | None,
) -> Case:
    """Return the case of a request, with what the tried nodes taught."""
    too_small = [
        found.context_tokens or 0
        for node_id, error in tried.items()
        if isinstance(error, ContextExceededError)
        and (node := fleet.get(node_id))
        and (found := node.models.get(model))
    ]
    return Case(model, need, tried, max(too_small, default=0), typical, left_ms)


def exclusion(case: Case, candidate: Candidate) -> KvplaneError | None:
    """Return why a node cannot take the request, or None when it can."""
    node = candidate.node
    if node.node_id in case.tried:
        return case.tried[node.node_id]
    model = node.models.get(case.model)
    if model is None:
        return ModelNotFoundError(f"node {node.node_id} does not have model {case.model!r}")
    return (
        _draining(node)
        or _context(case, candidate, model)
        or _budget(candidate)
        or _blocks_busy(case, candidate, model)
        or _queue_full(case, candidate, model)
        or _deadline(case, candidate, model)
    )


def _draining(node: Node) -> KvplaneError | None:
    if not node.draining:
        return None
    return NodeDrainingError(f"node {node.node_id} is draining: it takes no new work")


def _context(case: Case, candidate: Candidate, model: Model) -> KvplaneError | None:
    limit = model.context_tokens
    tokens = max(case.need.least_prompt_tokens, case.outgrown_tokens + 1)
    if limit is None or tokens <= limit:
        return None
    return ContextExceededError(
        f"the prompt has at least {tokens} tokens; the context of {model.name} on node "
        f"{candidate.node.node_id} has {limit}: shorten the prompt",
        measured=tokens,
        limit=limit,
    )


def _budget(candidate: Candidate) -> KvplaneError | None:
    blocks, limit = candidate.blocks, candidate.node.total_blocks
    if blocks is None or limit is None or blocks.required <= limit:
        return None
    return KvBudgetExceededError(
        f"the request needs at least {blocks.required} KV blocks; node {candidate.node.node_id} "
        f"has {limit} in all: shorten the prompt or lower max_tokens",
        measured=blocks.required,
        limit=limit,
    )


def _blocks_busy(case: Case, candidate: Candidate, model: Model) -> KvplaneError | None:
    blocks, total = candidate.blocks, candidate.node.total_blocks
    if blocks is None or total is None or blocks.required <= total - blocks.active:
        return None
    if candidate.in_flight >= model.slots:
        return None  # It waits for a slot, and blocks come free with that.
    retry_after_ms = _one_ends_ms(case, model)
    return KvBlocksBusyError(
        f"the request needs {blocks.required} KV blocks; running requests hold {blocks.active} of "
        f"the {total} on node {candidate.node.node_id}: retry in about {retry_after_ms} ms",
        retry_after_ms=retry_after_ms,
        measured=blocks.required,
        limit=max(0, total - blocks.active),
    )


def _queue_full(case: Case, candidate: Candidate, model: Model) -> KvplaneError | None:
    limit = model.slots + model.queue_limit
    if candidate.in_flight < limit:
        return None
    retry_after_ms = _one_ends_ms(case, model)
    return QueueFullError(
        f"node {candidate.node.node_id} has {candidate.in_flight} requests for {model.name}; "
        f"{model.slots} may run and {model.queue_limit} wait: retry in about {retry_after_ms} ms",
        retry_after_ms=retry_after_ms,
        measured=candidate.in_flight,
        limit=limit,
    )


def _deadline(case: Case, candidate: Candidate, model: Model) -> KvplaneError | None:
    expected_ms = candidate.total_ms
    if case.left_ms is None or not candidate.measured or expected_ms <= case.left_ms:
        return None
    return DeadlineUnreachableError(
        f"the first token is expected after {expected_ms:.0f} ms on node "
        f"{candidate.node.node_id}; the deadline leaves {case.left_ms:.0f} ms: allow more time",
        retry_after_ms=_one_ends_ms(case, model) if candidate.slot_wait_ms else PROBE_MS,
        measured=round(expected_ms),
        limit=round(case.left_ms),
    )


def _one_ends_ms(case: Case, model: Model) -> int:
    """Return how long it takes on average until one of the running requests ends."""
    service_ms = case.typical.service_ms if model.service_ms is None else model.service_ms
    return max(1, math.ceil(service_ms / model.slots))


def refusal(case: Case, fleet: Fleet, candidates: Sequence[Candidate]) -> KvplaneError:
    """Return what to tell the caller when every candidate is excluded: why, and what would help."""
    untried = (one for one in candidates if one.node.node_id not in case.tried)
    errors = [*case.tried.values(), *(one.excluded for one in untried if one.excluded)]
    if not errors:
        return _no_nodes(fleet)
    told = _for_caller(case.model, errors, case.tried)
    if isinstance(told, ModelNotFoundError) and told not in case.tried.values():
        return _no_such_model(case, fleet)
    return told


def refusal_of_tried(model: str, tried: Mapping[str, KvplaneError]) -> KvplaneError:
    """Return what to tell the caller when enough nodes were tried; at least one was."""
    return _for_caller(model, list(tried.values()), tried)


def _for_caller(
    model: str, errors: Sequence[KvplaneError], tried: Mapping[str, KvplaneError]
) -> KvplaneError:
    # Of one node only, "draining" is no answer to somebody who asked for any node.
    told = most_telling(errors, tried)
    return _draining_nodes(model, errors) if isinstance(told, NodeDrainingError) else told


def _no_nodes(fleet: Fleet) -> NoNodesError:
    if not fleet.heard:
        return NoNodesError(
            "no node is known yet: the registry has not answered this router; look at its address "
            "and at its health",
            retry_after_ms=_LOOK_AGAIN_MS,
        )
    return NoNodesError(
        "no node is alive: start a node agent, or see why those there are do not reach the "
        "registry",
        measured=0,
        limit=1,
    )


_RANKS: Mapping[type[BaseException], int] = {
    ExhaustedError: 0,
    UnavailableError: 1,
    KvBudgetExceededError: 2,
    ContextExceededError: 3,
    KvplaneError: 4,
    NodeDrainingError: 5,
    ModelNotFoundError: 6,
}


def most_telling(errors: Sequence[KvplaneError], tried: Mapping[str, KvplaneError]) -> KvplaneError:
    """Return the error that leaves the caller the most hope.

    What passes with time goes before what must be changed. Among equals, what a node said itself
    goes before what was only expected of it, then the shortest wait, then the greatest limit.
    """

    def key(error: KvplaneError) -> tuple[int, bool, float, float]:
        rank = next(_RANKS[kind] for kind in type(error).__mro__ if kind in _RANKS)
        wait_ms = math.inf if error.retry_after_ms is None else error.retry_after_ms
        limit = error.facts.get("limit", "")
        known = error in tried.values()
        return rank, not known, wait_ms, -int(limit) if limit.isdecimal() else 0

    return min(errors, key=key)


def _no_such_model(case: Case, fleet: Fleet) -> KvplaneError:
    models = sorted({name for node in fleet.alive() for name in node.models})
    if not models:
        return _no_engine(len(fleet.alive()))
    there = ", ".join(models)
    return ModelNotFoundError(
        f"no node has model {case.model!r}; the models there are: {there}",
        measured=case.model,
        limit=there,
    )


def _no_engine(nodes: int) -> KvplaneError:
    # A node whose engine is away lists no models: that says nothing of the one that is asked for.
    return EngineUnavailableError(
        f"none of the {nodes} live nodes lists a model: their engines are away or have none; "
        f"retry in about {_LOOK_AGAIN_MS} ms",
        retry_after_ms=_LOOK_AGAIN_MS,
        measured=0,
        limit=1,
    )


def _draining_nodes(model: str, errors: Sequence[KvplaneError]) -> KvplaneError:
    count = sum(isinstance(error, NodeDrainingError) for error in errors)
    return NodesDrainingError(
        f"{count} nodes with model {model!r} are draining, and no other took the request: end that "
        "for one of them, or add a node",
        measured=count,
        limit=0,
    )
