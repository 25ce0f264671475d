"""The adapter of Ollama, against a stand-in over a real engine."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.asking import ask, chat_request, first_piece, text_request
from harness.ollama_standin import OllamaStandIn
from harness.tiny_model import SHAPES, words
from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import (
    ContextExceededError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    KvplaneError,
    ModelNotFoundError,
    QueueFullError,
)
from kvplane_node_agent.engines.base import EngineRequest
from kvplane_node_agent.engines.ollama import Ollama
from kvplane_node_agent.engines.settings import EngineSettings

Start = Callable[..., Awaitable[tuple[OllamaStandIn, Ollama]]]


@pytest.fixture
async def start(nano_model: Path) -> AsyncIterator[Start]:
    """Start a stand-in with one model and connect to it."""
    async with AsyncExitStack() as owned:

        async def start(
            model: Path = nano_model, settings: dict[str, Any] | None = None, **options: Any
        ) -> tuple[OllamaStandIn, Ollama]:
            standin = OllamaStandIn({"tiny:latest": model}, **options)
            await owned.enter_async_context(standin.running())
            adapter = Ollama(EngineSettings(url=standin.url, **(settings or {})))
            owned.push_async_callback(adapter.close)
            return standin, adapter

        yield start


async def test_it_tells_its_models_before_and_after_one_is_loaded(start: Start) -> None:
    _, adapter = await start(settings={"slots": 3}, version="0.33.2")
    assert await adapter.describe() == "ollama 0.33.2"
    (before,) = await adapter.models()
    assert (before.name, before.loaded, before.slots, before.context_tokens) == (
        "tiny",
        False,
        3,
        None,
    )
    assert before.kv_bytes_per_token == SHAPES["nano"].kv_bytes_per_token
    await ask(adapter, text_request("tiny", "the"))
    (after,) = await adapter.models()
    assert (after.loaded, after.context_tokens) == (True, 4096)


async def test_models_that_run_elsewhere_or_only_embed_are_left_out(start: Start) -> None:
    cloud = {"name": "big:cloud", "digest": "c", "remote_host": "https://elsewhere.example"}
    embedder = {"name": "embed:latest", "digest": "e", "capabilities": ["embedding"]}
    _, adapter = await start(more_tags=[cloud, embedder])
    assert [model.name for model in await adapter.models()] == ["tiny"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(512, 512), (1_000_000, SHAPES["nano"].context_tokens)],
    ids=["as asked for", "at most what the model was trained for"],
)
async def test_the_operators_context_is_known_before_the_model_is_loaded(
    start: Start, asked: int, expected: int
) -> None:
    _, adapter = await start(settings={"context_tokens": asked})
    (model,) = await adapter.models()
    assert model.context_tokens == expected


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
@pytest.mark.parametrize("kind", [text_request, chat_request], ids=["text", "chat"])
async def test_a_repeated_prompt_is_taken_from_the_cache(
    start: Start, name: str, kind: Callable[[str, str], EngineRequest]
) -> None:
    _, adapter = await start()
    first, again = [await ask(adapter, kind(name, words(300))) for _ in range(2)]
    assert first.pieces == again.pieces
    assert first.end.prompt_tokens == again.end.prompt_tokens
    assert (first.end.prompt_tokens or 0) >= 300
    assert first.end.cached_tokens == 0
    assert again.end.cached_tokens == (again.end.prompt_tokens or 0) - 1
    assert first.end.completion_tokens == 4
    assert first.end.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert (first.end.load_ms or 0) > (again.end.load_ms or 0)
    assert first.end.prefill_ms is not None
    assert first.end.decode_ms is not None


@pytest.mark.parametrize(
    ("version", "prompt_tokens", "cached_tokens"),
    [
        ("0.3.14", None, None),
        ("0.4.0", 300, None),
        ("0.24.0", 300, None),
        ("0.30.0", None, None),
        ("0.30.1", 300, None),
        ("0.33.2", 300, None),
        ("0.33.3", 300, 299),
        ("0.0.0", 300, None),
    ],
)
async def test_counts_mean_what_they_mean_in_that_version(
    start: Start, version: str, prompt_tokens: int | None, cached_tokens: int | None
) -> None:
    standin, adapter = await start(version=version)
    # A build from source calls itself 0.0.0 and counts as the newest do.
    standin.counts_as = "0.33.2" if version == "0.0.0" else version
    request = text_request("tiny", words(300))
    await ask(adapter, request)
    again = await ask(adapter, request)
    assert again.end.prompt_tokens == prompt_tokens
    assert again.end.cached_tokens == cached_tokens
    assert again.end.completion_tokens == 4


async def test_plain_text_gets_no_template_and_no_prompt_is_cut(start: Start) -> None:
    standin, adapter = await start()
    await ask(adapter, text_request("tiny", "the", seed=7, top_k=3, top_p=0.5, stop=["x"]))
    await ask(adapter, chat_request("tiny", "the", max_tokens=1))
    text, chat = standin.seen
    assert (text["raw"], text["truncate"], text["stream"]) == (True, False, True)
    assert text["options"] == {
        "num_predict": 4, "temperature": 0, "seed": 7, "top_k": 3, "top_p": 0.5, "stop": ["x"]
    }  # fmt: skip
    assert chat["messages"] == [{"role": "user", "content": "the"}]
    assert "keep_alive" not in text | chat


async def test_one_context_a_model_keeps_it_loaded(start: Start) -> None:
    standin, adapter = await start(settings={"context_tokens": 1024})
    for request in (text_request("tiny", "the"), chat_request("tiny", "the")):
        await ask(adapter, request)
    assert [body["options"]["num_ctx"] for body in standin.seen] == [1024, 1024]
    assert standin.loads == 1


async def test_an_unloaded_model_has_lost_its_cache(start: Start) -> None:
    standin, adapter = await start()
    request = text_request("tiny", words(300))
    await ask(adapter, request)
    await standin.unload("tiny:latest")
    (model,) = await adapter.models()
    assert not model.loaded
    assert (await ask(adapter, request)).end.cached_tokens == 0


@pytest.mark.parametrize(
    "request_",
    [text_request("tiny", words(600)), chat_request("tiny", words(600))],
    ids=["text", "chat"],
)
async def test_a_prompt_over_the_context_is_refused_with_both_numbers(
    start: Start, request_: EngineRequest
) -> None:
    _, adapter = await start(settings={"context_tokens": 512})
    with pytest.raises(ContextExceededError, match="exceeds the available context") as refused:
        await ask(adapter, request_)
    assert int(refused.value.facts["prompt_tokens"]) >= 600
    assert refused.value.facts["context_tokens"] == "512"


async def test_a_model_that_is_not_there_is_not_found(start: Start) -> None:
    _, adapter = await start()
    with pytest.raises(ModelNotFoundError, match="model 'nope' not found"):
        await ask(adapter, text_request("nope", "the"))


BUSY = "server busy, please try again. maximum pending requests exceeded"
OLD_OVERFLOW = "the input length exceeds the context length"
SHIFT_OFF_OVERFLOW = "the prompt is longer than the context length currently available to the model"


@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        (503, BUSY, QueueFullError),
        (503, "unavailable", EngineUnavailableError),
        (500, "llama runner process has terminated", EngineUnavailableError),
        (403, "", EngineUnavailableError),
        (400, '"tiny:latest" does not support chat', InvalidRequestError),
        (400, OLD_OVERFLOW, ContextExceededError),
        (500, OLD_OVERFLOW, ContextExceededError),
        (400, SHIFT_OFF_OVERFLOW, ContextExceededError),
    ],
)
async def test_a_refusal_says_whose_fault_it_is(
    start: Start, status: int, error: str, expected: type[KvplaneError]
) -> None:
    standin, adapter = await start()
    standin.faults.refuse = status, error
    with pytest.raises(KvplaneError) as refused:
        await ask(adapter, text_request("tiny", "the"))
    assert type(refused.value) is expected
    assert (error in str(refused.value)) == (status == 400 or not error)
    assert (refused.value.retry_after_ms is not None) == (expected is QueueFullError)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"error_after": 2}, EngineFailedError),
        ({"cut_after": 2}, EngineFailedError),
        ({"error_after": 0}, EngineUnavailableError),
        ({"cut_after": 0}, EngineUnavailableError),
    ],
    ids=[
        "an error within the answer",
        "an answer without its end",
        "an error before the first piece",
        "an answer that is only an end",
    ],
)
async def test_a_stream_that_breaks_is_never_a_clean_end(
    start: Start, fault: dict[str, int], expected: type[KvplaneError]
) -> None:
    standin, adapter = await start()
    for name, pieces in fault.items():
        setattr(standin.faults, name, pieces)
    with pytest.raises(expected):
        await ask(adapter, text_request("tiny", "the"))


async def test_an_answer_that_nobody_wants_frees_its_slot(start: Start, mini_model: Path) -> None:
    standin, adapter = await start(mini_model)
    events = adapter.generate(text_request("tiny", "the", max_tokens=3000))
    await first_piece(events)
    engine, _ = standin.engines["tiny:latest"]
    assert await engine.busy_slots() == 1
    await events.aclose()
    await engine.idle(seconds=2)


async def test_a_runner_that_dies_within_an_answer_has_failed(
    start: Start, mini_model: Path
) -> None:
    standin, adapter = await start(mini_model)
    events = adapter.generate(text_request("tiny", "the", max_tokens=3000))
    await first_piece(events)
    await standin.engines["tiny:latest"][0].kill()
    with pytest.raises(EngineFailedError):
        async for _ in events:
            pass


async def test_an_ollama_that_is_down_is_unavailable() -> None:
    adapter = Ollama(EngineSettings(url="http://127.0.0.1:1"))
    for attempt in (
        ask(adapter, text_request("tiny", "the")),
        adapter.models(),
        adapter.describe(),
    ):
        with pytest.raises(EngineUnavailableError, match="does not answer"):
            await attempt
    await adapter.close()
