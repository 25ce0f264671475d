"""A router with a real metastore and a real registry, in this process, and scripted agents."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.routing import MODEL, model, node
from harness.scripted_agents import ScriptedAgent, answering
from harness.services import InProcess, free_address, health, until
from kvplane.common.v1 import generation_pb2, node_pb2, prompt_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_common.channels import dial
from kvplane_common.errors import KvplaneError, from_rpc
from kvplane_common.metastore import MetastoreClient
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve as serve_metastore
from kvplane_registry.config import RegistryConfig
from kvplane_registry.service import serve as serve_registry
from kvplane_router import service
from kvplane_router.config import RouterConfig
from kvplane_router.core import Core


class RouterCluster:
    """A running router, what stands behind it, and shorthands for its calls."""

    def __init__(
        self,
        metastore: InProcess[MetastoreConfig],
        registry: InProcess[RegistryConfig],
        stack: AsyncExitStack,
    ) -> None:
        self.metastore = metastore
        self.registry = registry
        self._stack = stack
        self.core: Core
        self.stub: router_pb2_grpc.RouterServiceStub
        self.address = ""

    async def start_router(self, health_is: str = "SERVING", **settings: Any) -> None:
        """Start the router, and wait for its health."""
        config = RouterConfig(
            listen="127.0.0.1:0",
            metastore=self.metastore.address,
            registry=self.registry.address,
            drain_s=0.2,
            **settings,
        )
        running, self.core = await self._stack.enter_async_context(service.answering(config))
        self.address = running.address
        channel = await self._stack.enter_async_context(dial(self.address))
        self.stub = router_pb2_grpc.RouterServiceStub(channel)
        await self.until_health_is(health_is)

    async def until_health_is(self, wanted: str) -> None:
        async def holds() -> bool:
            return await health(self.address) == wanted

        await until(holds)

    async def start_agent(
        self, node_id: str, agent: ScriptedAgent | None = None, **told: Any
    ) -> ScriptedAgent:
        """Start an agent and register it, and wait until the router knows it."""
        agent = agent or ScriptedAgent()
        await self._stack.enter_async_context(answering(agent))
        models = told.pop("models", (model(),))
        await self.register(node(node_id, *models, address=agent.address, **told))
        return agent

    async def register(self, told: node_pb2.Node) -> None:
        async with dial(self.registry.address) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            await stub.Register(registry_pb2.RegisterRequest(node=told))

        async def holds() -> bool:
            known = self.core.fleet.get(told.node_id)
            return known is not None and known.epoch == told.epoch

        await until(holds)

    async def until_idle(self) -> None:
        """Wait until the router holds no lease."""

        async def holds() -> bool:
            return not len(self.core.reservations)

        await until(holds)

    async def explain(self, request_id: str = "") -> router_pb2.ExplainResponse:
        return await self.stub.Explain(router_pb2.ExplainRequest(request_id=request_id))

    async def stored(self, prefix: bytes) -> dict[bytes, bytes]:
        """Return what the metastore has under a prefix."""
        async with dial(self.metastore.address) as channel:
            kvs, _ = await MetastoreClient(channel).range(prefix)
        return {kv.key: kv.value for kv in kvs}

    async def generate(self, **asked: Any) -> "Answer":
        """Run a request to its end. Raises grpc.aio.AioRpcError."""
        return Answer([step async for step in self.stub.Generate(generating(**asked))])


class Answer:
    """A whole answer, whose steps came in the order that the contract says."""

    def __init__(self, steps: list[router_pb2.GenerateResponse]) -> None:
        kinds = [step.WhichOneof("event") for step in steps]
        assert kinds == ["decision", *["delta"] * (len(kinds) - 2), "completion"]
        self.decision = steps[0].decision
        self.text = "".join(step.delta.text for step in steps)
        self.completion: generation_pb2.Completion = steps[-1].completion


def generating(text: str = "Why is the sky blue?", **asked: Any) -> router_pb2.GenerateRequest:
    """Return a request to generate."""
    values: dict[str, Any] = {"model": MODEL, "prompt": prompt_pb2.Prompt(text=text), **asked}
    return router_pb2.GenerateRequest(**values)


def routing(text: str = "Why is the sky blue?", **asked: Any) -> router_pb2.RouteRequest:
    """Return a request for a node."""
    values: dict[str, Any] = {"model": MODEL, "prompt": prompt_pb2.Prompt(text=text), **asked}
    return router_pb2.RouteRequest(**values)


async def refused(call: Awaitable[Any]) -> KvplaneError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc(raised.value)


@asynccontextmanager
async def router_cluster(data_dir: Path) -> AsyncIterator[RouterCluster]:
    """Run a metastore and a registry while the block runs; it starts the router itself."""
    metastore = InProcess(
        serve_metastore, MetastoreConfig(listen=free_address(), data_dir=data_dir, drain_s=0)
    )
    registry = InProcess(
        serve_registry,
        RegistryConfig(listen=free_address(), metastore=metastore.address, lease_s=3600, drain_s=0),
    )
    async with metastore, registry, AsyncExitStack() as stack:
        yield RouterCluster(metastore, registry, stack)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RouterCluster]:
    """A router that is ready, without nodes."""
    async with router_cluster(tmp_path) as made:
        await made.start_router()
        yield made
