"""KV cache bytes of one token, from a model's own metadata."""

from collections.abc import Mapping

CACHE_TYPE_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of one cached value: blocks of 32 values with their scales, where quantized."""

# Latent attention, recurrent state, and window layers with heads of another size: what a token
# takes in these does not follow from the heads.
_MOST = 2**40
_UNTOLD = (
    "attention.kv_lora_rank",
    "attention.key_length_swa",
    "full_attention_interval",
    "shortconv.",
    "ssm.",
    "wkv.",
)


def kv_bytes_per_token(metadata: Mapping[str, object], cache_type: str = "f16") -> float | None:
    """Return the bytes that one token takes in the KV cache, or None where that cannot be told.

    `metadata` has the keys of a GGUF file, such as "llama.block_count". In a model whose layers
    look back over a sliding window only, a token takes this much until it has left the window, and
    less afterwards. Raises ValueError for a cache type that is not one of CACHE_TYPE_BYTES.
    """
    if cache_type not in CACHE_TYPE_BYTES:
        known = ", ".join(CACHE_TYPE_BYTES)
        raise ValueError(f"cache type {cache_type!r} is unknown; known are {known}")
    family = metadata.get("general.architecture")
    prefix = f"{family}."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    if any(key.startswith(_UNTOLD) for key in own):
        return None
    heads, length = _kv_heads(own), _head_length(own)
    return heads * length * CACHE_TYPE_BYTES[cache_type] if heads and length else None


def context_tokens(metadata: Mapping[str, object]) -> int | None:
    """Return the context that the model was trained for, in tokens."""
    return _whole(metadata.get(f"{metadata.get('general.architecture')}.context_length"))


def _kv_heads(own: Mapping[str, object]) -> int | None:
    """KV heads of all layers that keep a cache of their own."""
    heads = own.get("attention.head_count_kv", own.get("attention.head_count"))
    layers = _whole(own.get("block_count"))
    if layers is None:
        return None
    layers -= _whole(own.get("attention.shared_kv_layers")) or 0
    if isinstance(heads, list | tuple):
        each = [_whole(count) for count in heads[:layers]]
        return None if None in each or len(each) < layers else sum(count or 0 for count in each)
    count = _whole(heads)
    return None if count is None else count * layers


def _head_length(own: Mapping[str, object]) -> int | None:
    """Values of one head's key and value together."""
    width, heads = _whole(own.get("embedding_length")), _whole(own.get("attention.head_count"))
    usual = width // heads if width and heads else None
    key = _whole(own.get("attention.key_length", usual))
    value = _whole(own.get("attention.value_length", usual))
    return None if key is None or value is None else key + value


def _whole(value: object) -> int | None:
    # JSON of /api/show may give whole numbers as floats.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= _MOST and value == int(value) else None
