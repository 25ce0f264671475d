"""Request streams that end when the service stops."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from kvplane_common.errors import UnavailableError

Request = TypeVar("Request")


class RequestStreams:
    """The open request streams of a service.

    A read that waits in gRPC must not be cancelled while its call lives, for gRPC still writes to
    it. So a stream that ends early leaves its read behind; gRPC ends that together with the call.
    """

    def __init__(self) -> None:
        self._stopping = asyncio.Event()
        self._reads: set[asyncio.Task[object]] = set()

    async def follow(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Request, None]:
        """Yield `requests` until they end. Raises UnavailableError when the service stops."""
        iterator = aiter(requests)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while True:
                read = self._read(iterator)
                await asyncio.wait({read, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    raise UnavailableError("the registry is stopping; connect again")
                request = read.result()
                if request is None:
                    return
                yield request
        finally:
            stopping.cancel()

    def close(self) -> None:
        """End every stream, now and in future."""
        self._stopping.set()

    async def wait_closed(self) -> None:
        """Wait for the reads that were left behind; to be awaited once the server has stopped."""
        await asyncio.gather(*self._reads, return_exceptions=True)

    def _read(self, iterator: AsyncIterator[Request]) -> "asyncio.Task[Request | None]":
        read = asyncio.create_task(_next(iterator))
        self._reads.add(read)
        read.add_done_callback(self._forget)
        return read

    def _forget(self, read: "asyncio.Task[object]") -> None:
        self._reads.discard(read)
        # Looked at, so that a call that broke off under a read left behind is no warning.
        _ = read.cancelled() or read.exception()


async def _next(iterator: AsyncIterator[Request]) -> Request | None:
    return await anext(iterator, None)
