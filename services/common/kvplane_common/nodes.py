"""Following the registry's nodes, over every loss of the registry."""

import asyncio
from collections.abc import AsyncGenerator

import grpc
import structlog

from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane_common.background import pauses_s

_log = structlog.get_logger(__name__)


async def follow_nodes(
    channel: grpc.aio.Channel,
) -> AsyncGenerator[registry_pb2.WatchNodesResponse, None]:
    """Yield the steps of the registry's node watch, for ever.

    After a loss it connects again by itself, and the first step of each connection has `reset`
    set: what is remembered meanwhile may be served from, and is replaced then. Close it
    (`contextlib.aclosing`) where it is left before its task ends.
    """
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    pauses, away = pauses_s(), False
    while True:
        why = "the watch ended"
        call = stub.WatchNodes(registry_pb2.WatchNodesRequest())
        try:
            async for step in call:
                if away:
                    _log.info("the registry is back")
                pauses, away = pauses_s(), False
                yield step
        except grpc.aio.AioRpcError as error:
            why = error.details() or error.code().name
        finally:
            call.cancel()
        if not away:
            _log.warning("the registry is away; going on with the nodes known", why=why)
        away = True
        await asyncio.sleep(next(pauses))
