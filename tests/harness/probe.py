"""A service with all four kinds of methods, whose handlers a test gives; messages are bytes."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

NAME = "kvplane.probe.v1.ProbeService"


def probe(**handlers: Any) -> Callable[[grpc.aio.Server], None]:
    """Return what registers the handlers: any of unary_unary, unary_stream and so on."""
    made = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(handler)
        for kind, handler in handlers.items()
    }
    generic = grpc.method_handlers_generic_handler(NAME, made)
    return lambda server: server.add_generic_rpc_handlers((generic,))


def start(channel: grpc.aio.Channel, kind: str, *requests: bytes) -> Any:
    """Call the method of that kind and return the running call."""
    method: Any = getattr(channel, kind)(f"/{NAME}/{kind}")
    return method(_each(requests) if kind.startswith("stream") else requests[0])


async def call(channel: grpc.aio.Channel, kind: str, *requests: bytes) -> list[bytes]:
    """Call the method of that kind and return its answers. Raises grpc.aio.AioRpcError."""
    running = start(channel, kind, *requests)
    if kind.endswith("unary"):
        return [await running]
    return [answer async for answer in running]


async def _each(requests: tuple[bytes, ...]) -> AsyncIterator[bytes]:
    for request in requests:
        yield request
