"""A server that answers with the bytes it was given, for what a healthy engine never says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress


def http(body: bytes, status: str = "200 OK") -> bytes:
    """Return a whole HTTP answer."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


def cut(body: bytes) -> bytes:
    """Return an HTTP answer that is shorter than it says."""
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) + 1}\r\n\r\n".encode() + body


class RawHttp:
    """Answers the n-th connection with the n-th answer, the last one again and again.

    An empty answer closes the connection without a word; None keeps it open and silent.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.paths: list[str] = []


@asynccontextmanager
async def raw_http(answers: Sequence[bytes | None]) -> AsyncIterator[RawHttp]:
    """Answer on a free port while the block runs."""
    done = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        answer = answers[min(len(raw.paths), len(answers) - 1)]
        raw.paths.append(head.split()[1].decode())
        if answer is None:
            await done.wait()
        writer.write(answer or b"")
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    raw = RawHttp(f"http://{host}:{port}")
    try:
        yield raw
    finally:
        done.set()
        server.close()
