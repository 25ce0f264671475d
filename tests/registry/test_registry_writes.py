"""Records whose write ended in doubt: what the registry holds in memory wins in the end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from harness.clock import ManualClock
from harness.services import InProcess, free_address, until
from kvplane.common.v1.node_pb2 import Node
from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.background import background
from kvplane_common.channels import dial
from kvplane_common.errors import MetastoreUnavailableError
from kvplane_common.keys import NODE_PREFIX
from kvplane_common.metastore import MetastoreClient
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve
from kvplane_registry.leases import Leases
from kvplane_registry.records import parse
from kvplane_registry.registry import Registry

NODE = Node(node_id="a", epoch=7, address="10.0.0.1:7710")


class LossyClient(MetastoreClient):
    """A real client whose replies get lost, or come late, when a test says so."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)
        self.loses_replies = False
        self.applied = asyncio.Event()
        self.replies = asyncio.Event()
        self.replies.set()

    async def write(
        self,
        operations: Sequence[metastore_pb2.Operation],
        conditions: Sequence[metastore_pb2.Condition] = (),
    ) -> int:
        revision = await super().write(operations, conditions)
        self.applied.set()
        await self.replies.wait()
        if self.loses_replies:
            raise MetastoreUnavailableError("the reply was lost")
        return revision

    async def records(self) -> dict[str, Node]:
        kvs, _ = await self.range(NODE_PREFIX)
        return {node.node_id: node for node in (parse(kv.value) for kv in kvs)}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[LossyClient]:
    config = MetastoreConfig(listen=free_address(), data_dir=tmp_path)
    async with InProcess(serve, config) as metastore, dial(metastore.address) as channel:
        yield LossyClient(channel)


@pytest.fixture
async def registry(client: LossyClient) -> Registry:
    made = Registry(Leases(ManualClock(), 5_000), 5.0, client)
    await made.load()
    return made


async def test_a_registration_without_a_reply_is_taken_back(
    registry: Registry, client: LossyClient
) -> None:
    client.loses_replies = True
    with pytest.raises(MetastoreUnavailableError):
        await registry.register(NODE)
    assert registry.nodes() == []
    assert list(await client.records()) == ["a"]
    client.loses_replies = False

    async def taken_back() -> bool:
        return await client.records() == {}

    async with background(registry.save()):
        await until(taken_back)


async def test_a_drain_whose_caller_went_away_is_taken_back(
    registry: Registry, client: LossyClient
) -> None:
    await registry.register(NODE)
    client.applied.clear()
    client.replies.clear()
    drain = asyncio.ensure_future(registry.drain("a", draining=True))
    await client.applied.wait()
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    assert not registry.nodes()[0].draining
    assert (await client.records())["a"].draining
    client.replies.set()

    async def taken_back() -> bool:
        return not (await client.records())["a"].draining

    async with background(registry.save()):
        await until(taken_back)


async def test_of_two_agents_that_want_one_node_id_at_once_one_gets_it(
    registry: Registry,
) -> None:
    other = Node(node_id="a", epoch=8, address="10.0.0.2:7710")
    results = await asyncio.gather(
        registry.register(NODE), registry.register(other), return_exceptions=True
    )
    assert [type(result).__name__ for result in results] == ["Node", "NodeIdTakenError"]
    assert registry.nodes()[0].address == NODE.address


async def test_a_broken_record_does_not_keep_the_others_away(
    registry: Registry, client: LossyClient
) -> None:
    await registry.register(NODE)
    broken = metastore_pb2.Put(key=NODE_PREFIX + b"broken", value=b"\xff\xff")
    await client.write([metastore_pb2.Operation(put=broken)])
    again = Registry(Leases(ManualClock(), 5_000), 5.0, client)
    await again.load()
    assert [node.node_id for node in again.nodes()] == ["a"]
