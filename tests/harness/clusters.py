"""A whole cluster in this process, in front of real engines, and what tests ask of it."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from harness.agents import Agent, running_agent
from harness.engines import EngineProcess
from harness.routers import Answer, generating, routing
from harness.services import InProcess, free_address, health, until
from harness.tiny_model import words
from kvplane.common.v1 import node_pb2, prompt_pb2, records_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_common.channels import dial
from kvplane_common.errors import KvplaneError, from_rpc
from kvplane_common.metastore import MetastoreClient
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve as serve_metastore
from kvplane_registry.config import RegistryConfig
from kvplane_registry.service import serve as serve_registry
from kvplane_router import service as router_service
from kvplane_router.config import RouterConfig
from kvplane_router.core import Core

Stream: TypeAlias = (
    "grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]"
)
"""A running answer."""

_SEEDS = itertools.count(1_000)


def fresh(count: int) -> str:
    """Return a text of `count` tokens that no test has asked before."""
    return words(count, seed=next(_SEEDS))


def drawing(max_tokens: int) -> prompt_pb2.Sampling:
    """Return greedy sampling of that many tokens."""
    return prompt_pb2.Sampling(max_tokens=max_tokens, temperature=0)


async def refused(call: Awaitable[Any]) -> KvplaneError:
    """Return the error with which a call fails."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc(raised.value)


async def next_step(call: Stream) -> router_pb2.GenerateResponse:
    """Return the next step of a running answer, which must have one."""
    step = await call.read()
    assert isinstance(step, router_pb2.GenerateResponse), "the answer has ended"
    return step


async def begun(call: Stream) -> router_pb2.Decision:
    """Wait for the first piece of an answer, and return where it comes from and why."""
    decision = (await next_step(call)).decision
    assert (await next_step(call)).HasField("delta")
    return decision


class Asking:
    """A router as its clients see it; each request is for one model and few tokens."""

    def __init__(self, stub: router_pb2_grpc.RouterServiceStub, model: str) -> None:
        self.stub = stub
        self.model = model

    def request(self, text: str = "", **asked: Any) -> router_pb2.GenerateRequest:
        """Return a request: `text` or `prompt`, and `max_tokens`, 4 unless told."""
        return generating(text, **self._filled(asked))

    def stream(self, text: str = "", *, limit_s: float | None = None, **asked: Any) -> Stream:
        """Begin a request that has `limit_s` seconds, and return the call."""
        return self.stub.Generate(self.request(text, **asked), timeout=limit_s)

    async def ask(self, text: str = "", *, limit_s: float | None = None, **asked: Any) -> Answer:
        """Run a request to its end. Raises grpc.aio.AioRpcError."""
        return Answer([step async for step in self.stream(text, limit_s=limit_s, **asked)])

    async def route(self, text: str = "", **asked: Any) -> router_pb2.RouteResponse:
        """Choose a node and hold capacity there."""
        return await self.stub.Route(routing(text, **self._filled(asked)))

    async def release(self, routed: router_pb2.RouteResponse) -> None:
        """Give a reservation back."""
        await self.stub.Release(
            router_pb2.ReleaseRequest(
                node_id=routed.decision.node_id, reservation_id=routed.reservation_id
            )
        )

    async def explain(self, request_id: str = "") -> router_pb2.ExplainResponse:
        """Return what the router remembers of a request."""
        return await self.stub.Explain(router_pb2.ExplainRequest(request_id=request_id))

    def _filled(self, asked: dict[str, Any]) -> dict[str, Any]:
        drawn = {"sampling": drawing(asked.pop("max_tokens", 4))}
        return {"model": self.model, **drawn, **asked}


class Router(Asking):
    """A router of this process, with the mind behind it."""

    def __init__(
        self, address: str, core: Core, stub: router_pb2_grpc.RouterServiceStub, model: str
    ) -> None:
        super().__init__(stub, model)
        self.address = address
        self.core = core

    async def until(self, holds: Callable[[Core], bool], limit_s: float = 20.0) -> None:
        """Wait until something holds of what it knows."""

        async def holds_now() -> bool:
            return holds(self.core)

        await until(holds_now, limit_s)

    async def until_knows(self, node_ids: Sequence[str]) -> None:
        """Wait until it can send requests to these nodes, and to no others."""

        def holds(core: Core) -> bool:
            able = [node.node_id for node in core.fleet.alive() if self.model in node.models]
            return able == sorted(node_ids)

        await self.until(holds)

    def in_flight(self, node_id: str) -> int:
        """Return what the node last reported to run or wait there."""
        node = self.core.fleet.get(node_id)
        return node.models[self.model].in_flight if node and self.model in node.models else 0

    def at_rest(self) -> bool:
        """Tell whether it holds nothing, and has heard that no node does."""
        busy = (
            node.active_blocks or self.in_flight(node.node_id) for node in self.core.fleet.alive()
        )
        return not len(self.core.reservations) and not any(busy)


class Cluster:
    """A metastore and a registry, with routers and agents in front of real engines."""

    def __init__(
        self,
        metastore: InProcess[MetastoreConfig],
        registry: InProcess[RegistryConfig],
        model: str,
        stack: AsyncExitStack,
    ) -> None:
        self.metastore = metastore
        self.registry = registry
        self.model = model
        self.agents: dict[str, Agent] = {}
        self.engines: dict[str, EngineProcess] = {}
        self.routers: list[Router] = []
        self._stack = stack

    @property
    def router(self) -> Router:
        """The first router."""
        return self.routers[0]

    async def add_agent(self, node_id: str, engine_url: str, **settings: Any) -> Agent:
        """Start an agent, and wait until every router can send requests there."""
        peers = {"registry": self.registry.address, "metastore": self.metastore.address}
        running = running_agent(engine_url, self.model, node_id=node_id, **peers, **settings)
        self.agents[node_id] = await self._stack.enter_async_context(running)
        for router in self.routers:
            await router.until_knows(list(self.agents))
        return self.agents[node_id]

    async def add_router(self, **settings: Any) -> Router:
        """Start a router, and wait until it serves and can send requests to every agent."""
        values: dict[str, Any] = {
            "registry": self.registry.address,
            "metastore": self.metastore.address,
        }
        config = RouterConfig(listen="127.0.0.1:0", drain_s=0.2, **values, **settings)
        running, core = await self._stack.enter_async_context(router_service.answering(config))
        channel = await self._stack.enter_async_context(dial(running.address))
        stub = router_pb2_grpc.RouterServiceStub(channel)
        router = Router(running.address, core, stub, self.model)

        async def serves() -> bool:
            return await health(running.address) == "SERVING"

        await until(serves)
        await router.until_knows(list(self.agents))
        self.routers.append(router)
        return router

    async def drain(self, node_id: str, draining: bool = True) -> None:
        """Drain a node through the registry, or end that, and wait until all know."""
        async with dial(self.registry.address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            await stub.Drain(registry_pb2.DrainRequest(node_id=node_id, draining=draining))

        def known(core: Core) -> bool:
            node = core.fleet.get(node_id)
            return node is not None and node.draining == draining

        for router in self.routers:
            await router.until(known)
        await self.agents[node_id].until_admitting(not draining)

    @asynccontextmanager
    async def only(self, node_id: str) -> AsyncIterator[None]:
        """Send every request of the block to one node: the others are drained."""
        others = [name for name in self.agents if name != node_id]
        try:
            for name in others:
                await self.drain(name)
            yield
        finally:
            for name in others:
                await self.drain(name, draining=False)

    async def loads(self) -> dict[str, node_pb2.Load]:
        """Return what each agent is doing."""
        return {node_id: await agent.load() for node_id, agent in self.agents.items()}

    async def at_rest(self) -> bool:
        """Tell whether no slot, block or lease is held anywhere: engines, agents, routers."""
        loads = (await self.loads()).values()
        engines = [await engine.busy_slots() for engine in self.engines.values()]
        held = [bool(load.models) or load.active_blocks > 0 for load in loads]
        routers = all(router.at_rest() for router in self.routers)
        return not any(engines) and not any(held) and routers

    async def until_at_rest(self, limit_s: float = 20.0) -> None:
        """Wait until nothing is held. Raises TimeoutError after `limit_s`."""
        await until(self.at_rest, limit_s)

    async def stored(self, prefix: bytes) -> dict[bytes, bytes]:
        """Return what the metastore has under a prefix."""
        async with dial(self.metastore.address) as channel:
            kvs, _ = await MetastoreClient(channel).range(prefix)
        return {kv.key: kv.value for kv in kvs}

    async def cached(self) -> set[bytes]:
        """Return the keys under which the agents record what they hold."""
        listings = [await agent.listing() for agent in self.agents.values()]
        return {_key(one) for listing in listings for one in listing.residencies}

    async def until_recorded(self) -> set[bytes]:
        """Wait until the metastore has what the agents hold, and return the keys."""

        async def recorded() -> bool:
            return set(await self.stored(b"/cache/")) == await self.cached()

        await until(recorded)
        return await self.cached()

    async def forget(self) -> None:
        """Let every agent forget its cached prompts, and wait until the routers have, too."""
        await self.until_at_rest()
        keys = await self.until_recorded()
        for agent in self.agents.values():
            await agent.evict_all()
        for router in self.routers:
            await router.until(lambda core: keys.isdisjoint(core.index.keys()))


def _key(held: records_pb2.Residency) -> bytes:
    return f"/cache/{held.node_id}/{held.model}/{held.chain.digests[-8:].hex()}".encode()


@asynccontextmanager
async def bare_cluster(data_dir: Path, model: str) -> AsyncIterator[Cluster]:
    """Run a metastore and a registry while the block runs; it adds agents and routers."""
    stored = MetastoreConfig(listen=free_address(), data_dir=data_dir, drain_s=0)
    known = RegistryConfig(listen=free_address(), metastore=stored.listen, lease_s=3600, drain_s=0)
    metastore, registry = InProcess(serve_metastore, stored), InProcess(serve_registry, known)
    async with metastore, registry, AsyncExitStack() as stack:
        yield Cluster(metastore, registry, model, stack)


@asynccontextmanager
async def engine_cluster(
    data_dir: Path,
    engines: Sequence[EngineProcess],
    policies: Sequence[str] = ("ttft",),
    **settings: Any,
) -> AsyncIterator[Cluster]:
    """Run a cluster with nodes "a", "b" and so on, and a router for each of `policies`.

    `settings` are those of the agents. At the end nothing may be held anywhere.
    """
    async with bare_cluster(data_dir, engines[0].name) as cluster:
        for node_id, engine in zip("abcdef", engines, strict=False):
            await cluster.add_agent(node_id, engine.url, **settings)
            cluster.engines[node_id] = engine
        for policy in policies:
            await cluster.add_router(policy=policy)
        yield cluster
        await cluster.until_at_rest()
