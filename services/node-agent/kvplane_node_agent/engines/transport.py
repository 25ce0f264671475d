"""HTTP to an engine: short questions, and answers that stream in lines.

Each request has a connection of its own. llama-server closes a connection after a stream while it
announces keep-alive, and a request sent into that gap would be lost.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog
from yarl import URL

from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engines.refused import RefusedError, error_text, one_line
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.engines.wire import not_understood, parse_object

MAX_LINE_BYTES = 64 * 1024 * 1024
"""Longest line of a stream; the engines repeat the whole prompt in some."""
_MAX_REFUSAL_BYTES = 64 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """An engine's whole answer to a short question."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """Return the JSON object that the body holds, or an empty one where it holds none."""
        return parse_object(self.body) or {}


class BrokenStreamError(Exception):
    """The answer broke off, or cannot be understood."""


class EngineHttp:
    """The connections to one engine. Must be made where an event loop runs, and closed."""

    def __init__(self, settings: EngineSettings) -> None:
        self._base = URL(settings.url)
        self.shown = str(self._base.with_user(None)) if self._base.user else settings.url
        """The base URL as it may be logged."""
        key = settings.api_key
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        connect_s = settings.connect_s
        self._short = aiohttp.ClientTimeout(total=settings.query_s, sock_connect=connect_s)
        self._long = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_s, sock_read=settings.read_idle_s
        )

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Reply:
        """GET `path`, or POST `body` to it. Raises EngineUnavailableError if nothing answers."""
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method, self._url(path), json=body, timeout=self._short
            ) as response:
                return Reply(response.status, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def read(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object at `path`.

        Raises EngineUnavailableError if the engine answers with anything but that.
        """
        reply = await self.ask(path, body)
        if reply.status != 200:
            raise unavailable(self.shown, path, reply)
        told = parse_object(reply.body)
        if told is None:
            raise not_understood(path)
        return told

    @asynccontextmanager
    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """POST `body` to `path` and give the lines of the answer as they come.

        Leaving the block closes the connection, which is how an engine learns that nobody waits.
        Raises EngineUnavailableError if no answer begins, RefusedError for a status other than
        200, and from the lines BrokenStreamError.
        """
        response = await self._open(path, body)
        try:
            async with aclosing(_chunks(response.content)) as chunks:
                if response.status != 200:
                    raise RefusedError(response.status, await _refusal(chunks))
                async with aclosing(_lines(chunks)) as lines:
                    yield lines
        finally:
            response.close()

    async def close(self) -> None:
        """Close every connection, in whatever state it is."""
        await self._session.close()

    async def _open(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        try:
            return await self._post(path, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            lost = isinstance(error, aiohttp.ClientConnectionError)
            if not lost or isinstance(error, TimeoutError):
                raise self._unreachable(error) from error
            # Nothing of an answer has come, so nothing can be said twice.
            _log.info("asking the engine once more", engine=self.shown, error=_words(error))
        try:
            return await self._post(path, body)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def _post(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        return await self._session.post(self._url(path), json=body, timeout=self._long)

    def _url(self, path: str) -> URL:
        return self._base.joinpath(path.lstrip("/"))

    def _unreachable(self, error: Exception) -> EngineUnavailableError:
        return EngineUnavailableError(
            f"the engine at {self.shown} does not answer: {_words(error)}"
        )


def unavailable(shown: str, path: str, reply: Reply) -> EngineUnavailableError:
    """Return the error for an answer about the engine that is of no use."""
    # No such question holds a prompt, so no answer to it can quote one.
    says = error_text(reply.body) or "nothing"
    return EngineUnavailableError(
        f"the engine at {shown} answered {path} with status {reply.status} and said: {says}"
    )


def _words(error: Exception) -> str:
    # What makes no sense as HTTP is quoted in these.
    quotes = isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError)
    return ("" if quotes else one_line(str(error))) or type(error).__name__


async def _chunks(content: aiohttp.StreamReader) -> AsyncGenerator[bytes]:
    try:
        async for chunk in content.iter_any():
            yield chunk
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise BrokenStreamError(f"the answer broke off: {_words(error)}") from error


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    rest = bytearray()
    async for chunk in chunks:
        # Only what is new is searched: a line may come in thousands of chunks.
        *ends, begin = chunk.split(b"\n")
        for end in ends:
            yield bytes(rest + end)
            rest.clear()
        rest += begin
        if len(rest) > MAX_LINE_BYTES:
            raise BrokenStreamError(f"a line of the answer is over {MAX_LINE_BYTES} bytes")
    if rest:
        yield bytes(rest)


async def _refusal(chunks: AsyncIterator[bytes]) -> bytes:
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) >= _MAX_REFUSAL_BYTES:
            break
    return bytes(body[:_MAX_REFUSAL_BYTES])
