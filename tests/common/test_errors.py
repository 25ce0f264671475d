"""Errors over the wire: what is raised in a handler arrives as the same error."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from harness.probe import NAME, call, probe, start
from harness.services import free_address
from kvplane_common.channels import dial
from kvplane_common.errors import (
    DETAILS_KEY,
    ExhaustedError,
    InvalidRequestError,
    KvplaneError,
    ModelNotFoundError,
    NodesDrainingError,
    NotFoundError,
    QueueFullError,
    UnavailableError,
    from_rpc,
)
from kvplane_common.serving import serving

KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def _all(root: type[KvplaneError]) -> list[type[KvplaneError]]:
    return [root, *(one for child in root.__subclasses__() for one in _all(child))]


@asynccontextmanager
async def serving_probe(**handlers: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        serving("127.0.0.1:0", [NAME], probe(**handlers), 0) as server,
        dial(server.address) as channel,
    ):
        yield channel


def handler(kind: str, act: Callable[[], Awaitable[None]]) -> Any:
    async def single(request: Any, context: Any) -> bytes:
        await act()
        return b"answer"

    async def several(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        await act()
        yield b"second"

    return several if kind.endswith("stream") else single


async def _error(channel: grpc.aio.Channel, kind: str) -> tuple[grpc.StatusCode, KvplaneError]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(channel, kind, b"")
    return raised.value.code(), from_rpc(raised.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_arrives_with_its_class_words_facts_and_retry(kind: str) -> None:
    async def act() -> None:
        raise QueueFullError("8 wait; the limit is 8", retry_after_ms=1_250, measured=8, limit=8)

    async with serving_probe(**{kind: handler(kind, act)}) as channel:
        code, error = await _error(channel, kind)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert type(error) is QueueFullError
    assert str(error) == "8 wait; the limit is 8"
    assert error.facts == {"measured": "8", "limit": "8"}
    assert error.retry_after_ms == 1_250


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unexpected_error_is_logged_and_tells_the_caller_no_inner_words(kind: str) -> None:
    async def act() -> None:
        raise ZeroDivisionError("secret")

    with capture_logs() as logs:
        async with serving_probe(**{kind: handler(kind, act)}) as channel:
            code, error = await _error(channel, kind)
    assert code is grpc.StatusCode.INTERNAL
    assert type(error) is KvplaneError
    assert "secret" not in str(error)
    assert [log["event"] for log in logs].count("unexpected error") == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_that_aborts_by_itself_keeps_its_status(kind: str) -> None:
    async def abort(context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone")

    async def single(request: Any, context: Any) -> bytes:
        await abort(context)
        return b""

    async def several(request: Any, context: Any) -> AsyncIterator[bytes]:
        await abort(context)
        yield b""

    chosen = several if kind.endswith("stream") else single
    async with serving_probe(**{kind: chosen}) as channel:
        code, error = await _error(channel, kind)
    assert code is grpc.StatusCode.DATA_LOSS
    assert (type(error), str(error)) == (KvplaneError, "gone")


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_passes_unchanged(kind: str) -> None:
    async def act() -> None:
        await asyncio.sleep(0)

    async with serving_probe(**{kind: handler(kind, act)}) as channel:
        answers = await call(channel, kind, b"")
    assert answers == ([b"first", b"second"] if kind.endswith("stream") else [b"answer"])


async def test_a_handler_may_write_its_answers_itself() -> None:
    async def write(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(b"one")
        raise NodesDrainingError("all drain")

    async with serving_probe(unary_stream=write) as channel:
        running = start(channel, "unary_stream", b"")
        assert await running.read() == b"one"
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await running.read()
    assert type(from_rpc(raised.value)) is NodesDrainingError


@pytest.mark.parametrize("when", ["while it waits", "while its answer waits to be read"])
async def test_a_caller_that_cancels_ends_the_handler(when: str) -> None:
    ended, waits = asyncio.Event(), when == "while it waits"

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            if waits:
                await asyncio.Event().wait()
            while True:
                yield b"x" * 1_000_000
        finally:
            await asyncio.sleep(0)
            ended.set()

    async with serving_probe(unary_stream=stream) as channel:
        running = start(channel, "unary_stream", b"")
        assert await running.read() == b"first"
        running.cancel()
        await asyncio.wait_for(ended.wait(), 10)


async def test_a_long_message_is_cut_and_keeps_its_class() -> None:
    async def act() -> None:
        raise ModelNotFoundError("no model " + "\u00e4" * 50_000, model="m" * 50_000)

    async with serving_probe(unary_unary=handler("unary_unary", act)) as channel:
        code, error = await _error(channel, "unary_unary")
    assert code is grpc.StatusCode.NOT_FOUND
    assert type(error) is ModelNotFoundError
    assert str(error).startswith("no model \u00e4")
    assert error.facts["model"].endswith("m...")


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving_probe() as channel:
        code, _ = await _error(channel, "unary_unary")
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_peer_that_is_not_there_is_unavailable() -> None:
    async with dial(free_address()) as channel:
        _, error = await _error(channel, "unary_unary")
    assert type(error) is UnavailableError


async def test_a_proxy_for_the_way_out_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act() -> None:
        await asyncio.sleep(0)

    for variable in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, f"http://{free_address()}")
    async with serving_probe(unary_unary=handler("unary_unary", act)) as channel:
        assert await call(channel, "unary_unary", b"") == [b"answer"]


@pytest.mark.parametrize("kind", _all(KvplaneError), ids=lambda kind: kind.__name__)
def test_every_error_survives_as_itself(kind: type[KvplaneError]) -> None:
    sent = kind("what was wrong", retry_after_ms=3, limit=4)
    details = ((DETAILS_KEY, sent.to_status().SerializeToString()),)
    got = from_rpc(_rpc_error(kind.code, details))
    assert type(got) is kind
    assert (str(got), got.facts, got.retry_after_ms) == ("what was wrong", {"limit": "4"}, 3)


def test_reasons_are_unique() -> None:
    reasons = [kind.reason for kind in _all(KvplaneError)]
    assert len(reasons) == len(set(reasons))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        pytest.param(grpc.StatusCode.NOT_FOUND, NotFoundError, id="not found"),
        pytest.param(grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError, id="invalid"),
        pytest.param(grpc.StatusCode.RESOURCE_EXHAUSTED, ExhaustedError, id="exhausted"),
        pytest.param(grpc.StatusCode.CANCELLED, UnavailableError, id="a peer that let go"),
        pytest.param(grpc.StatusCode.DATA_LOSS, KvplaneError, id="a status of no class"),
    ],
)
@pytest.mark.parametrize(
    "details", [(), ((DETAILS_KEY, b"\xff\xff"),)], ids=["no details", "broken details"]
)
def test_an_error_of_a_stranger_has_the_class_of_its_status(
    code: grpc.StatusCode, kind: type[KvplaneError], details: tuple[tuple[str, bytes], ...]
) -> None:
    error = from_rpc(_rpc_error(code, details))
    assert (type(error), str(error)) == (kind, "plain words")


def _rpc_error(
    code: grpc.StatusCode, details: tuple[tuple[str, bytes], ...]
) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*details), details="plain words"
    )
