"""The adapter of llama-server, against a real one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from harness.asking import ask, chat_request, first_piece, text_request
from harness.engines import EngineProcess, wait_for
from harness.tiny_model import SHAPES, words
from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import (
    ContextExceededError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    ModelNotFoundError,
)
from kvplane_node_agent.engines.base import EngineRequest
from kvplane_node_agent.engines.llama_server import LlamaServer
from kvplane_node_agent.engines.settings import EngineSettings

StartEngine = Callable[..., Awaitable[EngineProcess]]
Connect = Callable[..., LlamaServer]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    made: list[LlamaServer] = []

    def make(engine: EngineProcess, **settings: Any) -> LlamaServer:
        made.append(LlamaServer(EngineSettings(url=engine.url, **settings)))
        return made[-1]

    yield make
    for adapter in made:
        await adapter.close()


async def test_it_tells_name_slots_context_and_geometry(
    start_engine: StartEngine, nano_model: Path, connect: Connect
) -> None:
    engine = await start_engine(nano_model, slots=2, context_tokens=2048)
    adapter = connect(engine)
    assert (await adapter.describe()).startswith("llama-server b")
    (model,) = await adapter.models()
    assert (model.name, model.loaded, model.slots) == ("nano", True, 2)
    assert model.context_tokens == 1024
    assert model.kv_bytes_per_token == SHAPES["nano"].kv_bytes_per_token


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kv_bytes_per_token": 1000.0}, 1000.0),
        ({"cache_type": "q8_0"}, SHAPES["nano"].kv_bytes_per_token / 2 * 34 / 32),
    ],
    ids=["the operator says how many", "the operator says that the cache is quantized"],
)
async def test_the_operator_knows_better_how_many_bytes_a_token_takes(
    nano_engine: EngineProcess, connect: Connect, settings: dict[str, object], expected: float
) -> None:
    (model,) = await connect(nano_engine, **settings).models()
    assert model.kv_bytes_per_token == expected


@pytest.mark.parametrize(
    "request_",
    [text_request("nano", words(300)), chat_request("nano", words(300))],
    ids=["text", "chat"],
)
async def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_last_token(
    nano_engine: EngineProcess, connect: Connect, request_: EngineRequest
) -> None:
    adapter = connect(nano_engine)
    # Whatever the shared engine held before, another prompt has overwritten it.
    await ask(adapter, text_request("nano", words(40, seed=9)))
    first, again = [await ask(adapter, request_) for _ in range(2)]
    assert first.end.prompt_tokens == again.end.prompt_tokens
    assert (first.end.prompt_tokens or 0) >= 300
    assert first.end.cached_tokens == 0
    assert again.end.cached_tokens == (again.end.prompt_tokens or 0) - 1
    assert first.pieces == again.pieces
    assert first.end.completion_tokens == 4
    assert first.end.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert first.end.prefill_ms is not None
    assert first.end.decode_ms is not None
    assert first.end.load_ms is None


async def test_sampling_reaches_the_engine(nano_engine: EngineProcess, connect: Connect) -> None:
    adapter = connect(nano_engine)
    draws = {"temperature": 2.0, "max_tokens": 16}
    texts = [
        "".join((await ask(adapter, text_request("nano", "the", **draws, **more))).pieces)
        for more in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"seed": 1, "top_k": 1})
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
    stop = texts[0][len(texts[0]) // 2 :][:3]
    stopped = await ask(adapter, text_request("nano", "the", **draws, seed=1, stop=[stop]))
    assert "".join(stopped.pieces) == texts[0].partition(stop)[0]
    assert stopped.end.finish_reason == generation_pb2.FINISH_REASON_STOP


async def test_without_max_tokens_the_answer_fills_the_context(
    start_engine: StartEngine, nano_model: Path, connect: Connect
) -> None:
    adapter = connect(await start_engine(nano_model, context_tokens=256))
    said = await ask(adapter, text_request("nano", words(200), max_tokens=None))
    assert said.end.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    assert said.end.completion_tokens == pytest.approx(256 - 200, abs=1)


@pytest.mark.parametrize(
    "request_",
    [text_request("nano", words(5000)), chat_request("nano", words(5000))],
    ids=["text", "chat"],
)
async def test_a_prompt_over_the_context_is_refused_with_both_numbers(
    nano_engine: EngineProcess, connect: Connect, request_: EngineRequest
) -> None:
    with pytest.raises(ContextExceededError) as refused:
        await ask(connect(nano_engine), request_)
    assert int(refused.value.facts["prompt_tokens"]) >= 5000
    assert refused.value.facts["context_tokens"] == "4096"


async def test_another_model_is_not_found(nano_engine: EngineProcess, connect: Connect) -> None:
    with pytest.raises(ModelNotFoundError, match="has no model 'mini'; it has nano"):
        await ask(connect(nano_engine), text_request("mini", "the"))


async def test_what_the_engine_does_not_take_is_an_invalid_request(
    nano_engine: EngineProcess, connect: Connect
) -> None:
    with pytest.raises(InvalidRequestError, match="refused the request"):
        await ask(connect(nano_engine), text_request("nano", "the", temperature=float("nan")))


@pytest.mark.parametrize("way", ["closed", "cancelled"])
async def test_an_answer_that_nobody_wants_frees_its_slot(
    start_engine: StartEngine, mini_model: Path, connect: Connect, way: str
) -> None:
    engine = await start_engine(mini_model)
    adapter = connect(engine)
    events = adapter.generate(text_request("mini", "the", max_tokens=3000))
    await first_piece(events)
    assert await engine.busy_slots() == 1
    if way == "cancelled":
        rest = asyncio.create_task(_read_all(events))
        await asyncio.sleep(0)
        rest.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rest
    else:
        await events.aclose()
    await engine.idle(seconds=2)


async def test_a_prefill_that_nobody_waits_for_ends_before_it_is_done(
    start_engine: StartEngine, mini_model: Path, connect: Connect
) -> None:
    engine = await start_engine(mini_model, context_tokens=8192)
    adapter = connect(engine)
    # Seconds of prefill, of which one batch is 256 tokens.
    waiting = asyncio.create_task(ask(adapter, text_request("mini", words(7000))))

    async def works() -> bool:
        return await engine.busy_slots() == 1

    await wait_for(works)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await engine.idle(seconds=5)
    (slot,) = await engine.slots()
    assert slot["n_prompt_tokens_processed"] < 7000


async def test_an_engine_that_dies_within_an_answer_has_failed(
    start_engine: StartEngine, mini_model: Path, connect: Connect
) -> None:
    engine = await start_engine(mini_model)
    async with aclosing(connect(engine).generate(text_request("mini", "a", max_tokens=3000))) as it:
        await first_piece(it)
        await engine.kill()
        with pytest.raises(EngineFailedError):
            await _read_all(it)


async def test_an_engine_that_is_down_is_unavailable_until_it_is_back(
    start_engine: StartEngine, nano_model: Path, connect: Connect
) -> None:
    engine = await start_engine(nano_model)
    adapter = connect(engine)
    request = text_request("nano", "the")
    assert (await ask(adapter, request)).pieces
    await engine.kill()
    for attempt in (ask(adapter, request), adapter.models(), adapter.describe()):
        with pytest.raises(EngineUnavailableError, match="does not answer"):
            await attempt
    await engine.restart()
    assert (await ask(adapter, request)).pieces


async def test_an_engine_with_a_key_answers_those_who_have_it(
    start_engine: StartEngine, nano_model: Path, connect: Connect
) -> None:
    engine = await start_engine(nano_model, api_key="secret")
    assert (await ask(connect(engine, api_key="secret"), text_request("nano", "the"))).pieces
    with pytest.raises(EngineUnavailableError, match="Invalid API Key") as refused:
        await connect(engine, api_key="wrong").models()
    assert "wrong" not in str(refused.value) + repr(EngineSettings("http://x", api_key="wrong"))


async def test_answers_one_after_the_other_never_meet_a_connection_that_closes(
    nano_engine: EngineProcess, connect: Connect
) -> None:
    adapter = connect(nano_engine)
    for _ in range(60):
        await ask(adapter, text_request("nano", "the", max_tokens=1))


async def _read_all(events: AsyncIterator[object]) -> None:
    async for _ in events:
        pass
