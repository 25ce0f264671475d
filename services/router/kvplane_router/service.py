"""Puts the router together, and runs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc

from kvplane.router.v1 import router_pb2_grpc
from kvplane_common.background import background
from kvplane_common.channels import dial
from kvplane_common.clock import SystemClock
from kvplane_common.metastore import MetastoreClient, WriteBehind
from kvplane_common.serving import Serving, serving
from kvplane_router.agents import Agents
from kvplane_router.config import RouterConfig
from kvplane_router.core import Core
from kvplane_router.decide import Rules
from kvplane_router.dispatch import Dispatcher
from kvplane_router.follow import Followed, follow_cache, follow_fleet, follow_sessions, sweep
from kvplane_router.servicer import NAME, RouterServicer


async def serve(config: RouterConfig, stop: asyncio.Event) -> None:
    """Answer until `stop` is set. Raises OSError if the address is taken."""
    async with answering(config):
        await stop.wait()


@asynccontextmanager
async def answering(config: RouterConfig) -> AsyncIterator[tuple[Serving, Core]]:
    """Answer while the block runs; give it the server and the mind behind it."""
    clock = SystemClock()
    core = Core(clock, Rules(config.policy, config.min_match_tokens), config.session_ttl_s)
    async with (
        dial(config.metastore) as metastore,
        dial(config.registry) as registry,
        aclosing(Agents()) as agents,
    ):
        client = MetastoreClient(metastore)
        store = WriteBehind(client)
        dispatcher = Dispatcher(core, agents, store, clock, config.max_attempts)
        servicer = RouterServicer(core, dispatcher, clock, config.max_prompt_bytes)
        followed = Followed()

        def register(server: grpc.aio.Server) -> None:
            router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, server)

        owned = (
            follow_cache(client, core, followed.cache),
            follow_sessions(client, core, followed.sessions),
            follow_fleet(registry, core, agents, followed.nodes),
            sweep(core, client),
            store.run(),
        )
        # Around the server: answers that still run at its end need them.
        async with background(*owned):
            async with (
                serving(config.listen, [NAME], register, config.drain_s) as running,
                background(_tell_ready(followed, running)),
            ):
                yield running, core
            await store.flush()


async def _tell_ready(followed: Followed, running: Serving) -> None:
    await followed.wait()
    await running.set_ready(True)
