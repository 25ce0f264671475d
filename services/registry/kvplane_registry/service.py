"""Puts the registry together, and runs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvplane.registry.v1 import registry_pb2_grpc
from kvplane_common.background import background
from kvplane_common.channels import dial
from kvplane_common.clock import SystemClock
from kvplane_common.metastore import MetastoreClient
from kvplane_common.serving import Serving, serving
from kvplane_registry.config import RegistryConfig
from kvplane_registry.leases import Leases
from kvplane_registry.registry import Registry
from kvplane_registry.servicer import NAME, RegistryServicer
from kvplane_registry.streams import RequestStreams


async def serve(config: RegistryConfig, stop: asyncio.Event) -> None:
    """Answer until `stop` is set. Raises OSError if the address is taken."""
    async with running(config):
        await stop.wait()


@asynccontextmanager
async def running(config: RegistryConfig) -> AsyncIterator[Serving]:
    """Answer while the block runs; serving once the nodes are read from the metastore."""
    async with dial(config.metastore) as channel:
        leases = Leases(SystemClock(), config.lease_s * 1000)
        registry = Registry(leases, config.lease_s, MetastoreClient(channel))
        streams = RequestStreams()
        servicer = RegistryServicer(registry, streams)

        def register(server: grpc.aio.Server) -> None:
            registry_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)

        async with serving(config.listen, [NAME], register, config.drain_s) as answering:
            try:
                async with background(_live(registry, answering)):
                    yield answering
            finally:
                # Streams that never end by themselves must not hold up the stop.
                registry.feed.close()
                streams.close()
        await streams.wait_closed()


async def _live(registry: Registry, answering: Serving) -> None:
    await registry.load()
    await answering.set_ready(True)
    try:
        async with background(registry.save()):
            await registry.expire()
    finally:
        # Without the expiry of leases it must not look healthy, should that ever fail.
        await answering.set_ready(False)
