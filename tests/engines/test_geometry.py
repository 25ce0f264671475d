"""KV cache bytes of a token, checked against figures that others measured."""

from typing import Any

import pytest

from kvplane_node_agent.geometry import CACHE_TYPE_BYTES, context_tokens, kv_bytes_per_token

KIB = 1024


def gguf_keys(family: str, **keys: Any) -> dict[str, object]:
    """GGUF keys of a model; double underscores are dots."""
    own = {f"{family}.{name.replace('__', '.')}": value for name, value in keys.items()}
    return {"general.architecture": family, **own}


def dense(family: str, layers: int, width: int, heads: int, kv: Any, **more: Any) -> Any:
    return gguf_keys(
        family,
        block_count=layers,
        embedding_length=width,
        attention__head_count=heads,
        attention__head_count_kv=kv,
        **more,
    )


QWEN3_4B = dense("qwen3", 36, 2560, 32, 8, attention__key_length=128, attention__value_length=128)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        pytest.param(dense("qwen2", 28, 3584, 28, 4), 56 * KIB, id="Qwen2.5-7B"),
        pytest.param(dense("qwen2", 28, 1536, 12, 2), 28 * KIB, id="Qwen2.5-1.5B"),
        pytest.param(dense("llama", 28, 3072, 24, 8), 112 * KIB, id="Llama-3.2-3B"),
        pytest.param(dense("llama", 32, 4096, 32, 8), 128 * KIB, id="Llama-3.1-8B, Mistral-7B"),
        pytest.param(dense("phi3", 32, 3072, 24, 8), 128 * KIB, id="Phi-4-mini"),
        pytest.param(QWEN3_4B, 144 * KIB, id="heads longer than width by heads"),
        pytest.param(dense("deci", 4, 512, 8, [8, 4, 0, 4]), 4 * KIB, id="KV heads by layer"),
        pytest.param(
            dense("gemma3n", 4, 512, 8, 8, attention__shared_kv_layers=2), 4 * KIB,
            id="layers that share the cache of others",
        ),
        pytest.param(
            dense("gemma3", 2, 512, 8, 8, attention__sliding_window=512), 4 * KIB,
            id="a sliding window, before a token leaves it",
        ),
        pytest.param(
            gguf_keys("gpt2", block_count=2, embedding_length=512, attention__head_count=8),
            4 * KIB, id="every head with a cache of its own",
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_token_are_those_of(metadata: dict[str, object], expected: float) -> None:
    assert kv_bytes_per_token(metadata) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param({}, id="nothing is known"),
        pytest.param(gguf_keys("llama", block_count=2), id="no heads"),
        pytest.param(dense("llama", 2, 512, 8, None), id="the list of heads was left out"),
        pytest.param(dense("deci", 4, 512, 8, [8, 4]), id="the list of heads is short"),
        pytest.param(
            dense("deepseek2", 2, 512, 8, 8, attention__kv_lora_rank=512), id="latent attention"
        ),
        pytest.param(dense("nemotron_h", 2, 512, 8, [0, 8], ssm__state_size=1), id="hybrid"),
        pytest.param(
            dense("gemma4", 2, 512, 8, 8, attention__key_length_swa=256), id="two sizes of heads"
        ),
        pytest.param(dense("mamba", 2, 512, 0, 0), id="no attention at all"),
    ],
)
def test_bytes_of_a_token_are_not_guessed_when(metadata: dict[str, object]) -> None:
    assert kv_bytes_per_token(metadata) is None


@pytest.mark.parametrize(
    ("cache_type", "kib"),
    [("f32", 112), ("f16", 56), ("bf16", 56), ("q8_0", 29.75), ("q5_1", 21), ("q4_0", 15.75)],
)
def test_a_quantized_cache_takes_less(cache_type: str, kib: float) -> None:
    assert kv_bytes_per_token(dense("qwen2", 28, 3584, 28, 4), cache_type) == kib * KIB


def test_an_unknown_cache_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=f"'q2' is unknown; known are {', '.join(CACHE_TYPE_BYTES)}"
    ):
        kv_bytes_per_token({}, "q2")


def test_the_trained_context_is_told_or_unknown() -> None:
    assert context_tokens(gguf_keys("llama", context_length=8192)) == 8192
    assert context_tokens({}) is None
