"""What a healthy engine never does: both adapters against scripted bytes."""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from harness.raw_http import cut, http, raw_http
from kvplane_common.errors import (
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    KvplaneError,
)
from kvplane_node_agent.engines.answer import answer
from kvplane_node_agent.engines.base import Finished, Piece
from kvplane_node_agent.engines.llama_wire import LlamaDecoder, refusal
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.engines.transport import EngineHttp, _lines

PIECE = b'data: {"content":"the","stop":false}\n\n'
END = b'data: {"content":"","stop":true,"stop_type":"limit"}\n\n'
EMPTY = b""


@asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[EngineHttp]:
    connection = EngineHttp(EngineSettings(url=url, **settings))
    try:
        yield connection
    finally:
        await connection.close()


async def read(http_: EngineHttp) -> list[Piece | Finished]:
    events = answer(http_, "/completion", {}, LlamaDecoder(), refusal)
    async with aclosing(events) as it:
        return [event async for event in it]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (http(PIECE), EngineFailedError),
        (cut(PIECE), EngineFailedError),
        (http(PIECE + b'data: {"error":{"code":500,"message":"boom"}}\n\n'), EngineFailedError),
        (http(PIECE + b'error: {"code":500,"message":"boom"}\n\n'), EngineFailedError),
        (http(PIECE + b"data: {\n\n"), EngineFailedError),
        (http(PIECE + b'data: {"choices":[{"delta":7}]}\n\n'), EngineFailedError),
        (http(b'data: {"choices":null}\n\n'), EngineUnavailableError),
        (http(b'data: {"choices":[{"delta":{"content":{}}}]}\n\n'), EngineUnavailableError),
        (http(b'data: {"content":"\\ud800"}\n\n'), EngineUnavailableError),
        (http(b""), EngineUnavailableError),
        (cut(b""), EngineUnavailableError),
        (http(b'data: {"error":{"code":500,"message":"boom"}}\n\n'), EngineUnavailableError),
        (http(b'data: {"error":{"code":400,"message":"bad"}}\n\n'), InvalidRequestError),
        (http(b"data: nonsense\n\n"), EngineUnavailableError),
        (
            http(b'{"error":{"message":"boom"}}', "500 Internal Server Error"),
            EngineUnavailableError,
        ),
        (http(b"not json", "500 Internal Server Error"), EngineUnavailableError),
        (b"SMTP here\r\n\r\n", EngineUnavailableError),
    ],
    ids=[
        "ends after a piece",
        "is cut after a piece",
        "reports an error after a piece",
        "reports an error after a piece in the older way",
        "talks nonsense after a piece",
        "changes its shape after a piece",
        "has no choices",
        "has a piece that is no text",
        "has a piece with half a character",
        "ends before a piece",
        "is cut before a piece",
        "reports an error before a piece",
        "reports the caller's error before a piece",
        "talks nonsense before a piece",
        "fails with a message",
        "fails without JSON",
        "speaks no HTTP",
    ],
)
async def test_an_answer_that(reply: bytes, expected: type[KvplaneError]) -> None:
    async with raw_http([reply]) as engine, connected(engine.url) as http_:
        with pytest.raises(KvplaneError) as failed:
            await read(http_)
    assert type(failed.value) is expected
    assert "boom" not in str(failed.value)


async def test_a_connection_that_closes_before_the_answer_is_tried_once_more() -> None:
    async with raw_http([EMPTY, http(PIECE + END)]) as engine, connected(engine.url) as http_:
        piece, end = await read(http_)
    assert piece == Piece("the")
    assert isinstance(end, Finished)
    assert engine.paths == ["/completion"] * 2


async def test_it_is_not_tried_a_third_time() -> None:
    async with raw_http([EMPTY]) as engine, connected(engine.url) as http_:
        with pytest.raises(EngineUnavailableError):
            await read(http_)
    assert len(engine.paths) == 2


async def test_a_silence_that_is_longer_than_allowed_ends_the_answer() -> None:
    async with raw_http([None]) as engine, connected(engine.url, read_idle_s=0.05) as http_:
        with pytest.raises(EngineUnavailableError):
            await read(http_)
    assert len(engine.paths) == 1


async def test_a_model_that_is_being_loaded_makes_the_engine_unavailable_for_a_while() -> None:
    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
    reply = http(json.dumps(loading).encode(), "503 Service Unavailable")
    async with raw_http([reply]) as engine, connected(engine.url) as http_:
        with pytest.raises(EngineUnavailableError, match="not ready: status 503") as failed:
            await read(http_)
    assert failed.value.retry_after_ms is not None


async def test_lines_may_come_in_any_portions() -> None:
    reply = http((PIECE * 3 + END).replace(b"\n\n", b"\r\n\r\n") + b": a comment\n\n")
    async with raw_http([reply]) as engine, connected(engine.url) as http_:
        events = await read(http_)
    assert events[:3] == [Piece("the")] * 3


async def test_a_refusal_without_an_end_is_not_read_to_its_end() -> None:
    endless = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 70_000
    async with raw_http([endless]) as engine, connected(engine.url) as http_:
        with pytest.raises(InvalidRequestError):
            await read(http_)


async def test_a_long_line_in_many_chunks_comes_whole() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"x" * 100
        yield b"\n\ny\nz"

    assert [line async for line in _lines(chunks())] == [b"x" * 100_000, b"", b"y", b"z"]


async def test_a_password_in_the_url_is_not_shown() -> None:
    async with connected("http://me:secret@127.0.0.1:1") as http_:
        with pytest.raises(EngineUnavailableError) as failed:
            await http_.read("/props")
    assert "secret" not in str(failed.value)
