"""A registry with a real metastore behind it, in this process, and clients of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.services import InProcess, free_address
from kvplane.common.v1.node_pb2 import Node
from kvplane.registry.v1 import registry_pb2 as wire
from kvplane.registry.v1.registry_pb2_grpc import RegistryServiceStub
from kvplane_common.channels import dial
from kvplane_common.errors import from_rpc
from kvplane_common.metastore import MetastoreClient
from kvplane_common.nodes import follow_nodes
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve as serve_metastore
from kvplane_registry.config import RegistryConfig
from kvplane_registry.service import serve as serve_registry

HERE, THERE = "10.0.0.1:7710", "10.0.0.2:7710"
LONG_S, SHORT_S = 60.0, 0.5
LIMIT_S = 20.0


@dataclass
class Cluster:
    metastore: InProcess[MetastoreConfig]
    registry: InProcess[RegistryConfig]
    channel: grpc.aio.Channel

    @property
    def stub(self) -> RegistryServiceStub:
        return RegistryServiceStub(self.channel)

    async def register(
        self, node_id: str = "a", epoch: int = 7, address: str = HERE, **fields: Any
    ) -> Node:
        node = Node(node_id=node_id, epoch=epoch, address=address, **fields)
        return (await self.stub.Register(wire.RegisterRequest(node=node))).node

    async def drain(self, node_id: str = "a", draining: bool = True) -> Node:
        request = wire.DrainRequest(node_id=node_id, draining=draining)
        return (await self.stub.Drain(request)).node

    async def deregister(self, node_id: str = "a", epoch: int = 0) -> None:
        await self.stub.Deregister(wire.DeregisterRequest(node_id=node_id, epoch=epoch))

    async def nodes(self) -> dict[str, Node]:
        reply = await self.stub.ListNodes(wire.ListNodesRequest())
        return {node.node_id: node for node in reply.nodes}

    async def state(self, node_id: str = "a") -> int:
        return (await self.nodes())[node_id].state

    async def records(self) -> dict[str, Node]:
        async with dial(self.metastore.address) as channel:
            kvs, _ = await MetastoreClient(channel).range(b"/node/")
        return {kv.key.decode(): Node.FromString(kv.value) for kv in kvs}


@asynccontextmanager
async def cluster(data_dir: Path, lease_s: float) -> AsyncIterator[Cluster]:
    store, address = free_address(), free_address()
    metastore = InProcess(serve_metastore, MetastoreConfig(listen=store, data_dir=data_dir))
    config = RegistryConfig(listen=address, metastore=store, lease_s=lease_s)
    async with (
        metastore,
        InProcess(serve_registry, config) as registry,
        dial(address) as channel,
    ):
        yield Cluster(metastore, registry, channel)


@asynccontextmanager
async def raises_on_the_wire(kind: type[Exception], **facts: str) -> AsyncIterator[None]:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        yield
    error = from_rpc(raised.value)
    assert type(error) is kind, error
    assert facts.items() <= error.facts.items()


class Watch:
    """What one watcher knows after the steps so far."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._steps = follow_nodes(channel)
        self.nodes: dict[str, Node] = {}
        self.resets = 0

    async def step(self) -> wire.WatchNodesResponse:
        step = await asyncio.wait_for(anext(self._steps), LIMIT_S)
        if step.reset:
            self.resets += 1
            self.nodes = {}
        self.nodes |= {node.node_id: node for node in step.nodes}
        for node_id in step.removed_node_ids:
            del self.nodes[node_id]
        return step

    async def until(self, holds: Callable[["Watch"], bool]) -> None:
        while not holds(self):
            await self.step()

    async def until_lost(self, node_id: str = "a") -> None:
        lost = Node.STATE_LOST
        await self.until(lambda seen: node_id in seen.nodes and seen.nodes[node_id].state == lost)

    async def aclose(self) -> None:
        await self._steps.aclose()


class Beats:
    """One heartbeat stream."""

    def __init__(self, fleet: Cluster) -> None:
        self._call = fleet.stub.Heartbeat()

    async def beat(self, node_id: str = "a", epoch: int = 7, **figures: Any) -> bool:
        request = wire.HeartbeatRequest(node_id=node_id, epoch=epoch, **figures)
        await self._call.write(request)
        return await self.answer()

    async def answer(self) -> bool:
        answer = await asyncio.wait_for(self._call.read(), LIMIT_S)
        assert isinstance(answer, wire.HeartbeatResponse)
        return answer.draining

    async def end(self) -> None:
        await self._call.done_writing()
        assert await asyncio.wait_for(self._call.read(), LIMIT_S) == grpc.aio.EOF
