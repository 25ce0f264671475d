"""The registry as a process of its own, ended gently and not."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.services import OwnProcess, free_address
from kvplane.common.v1.node_pb2 import Node
from kvplane.registry.v1 import registry_pb2 as wire
from kvplane.registry.v1.registry_pb2_grpc import RegistryServiceStub
from kvplane_common.channels import dial


@pytest.fixture
async def metastore(tmp_path: Path) -> AsyncIterator[OwnProcess]:
    arguments = ("--data-dir", str(tmp_path))
    async with OwnProcess("kvplane_metastore", free_address(), *arguments) as process:
        yield process


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGTERM, 0, id="asked to stop"),
        pytest.param(signal.SIGINT, 0, id="interrupted"),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed"),
    ],
)
async def test_it_comes_back_with_its_nodes_and_drains(
    metastore: OwnProcess, number: signal.Signals, status: int
) -> None:
    arguments = ("--metastore", metastore.address, "--lease-s", "60")
    async with OwnProcess("kvplane_registry", free_address(), *arguments) as registry:
        async with dial(registry.address) as channel:
            stub = RegistryServiceStub(channel)
            for node_id in ("a", "b"):
                node = Node(node_id=node_id, epoch=3, address="10.0.0.1:7710")
                await stub.Register(wire.RegisterRequest(node=node))
            await stub.Drain(wire.DrainRequest(node_id="b", draining=True))
            watch = stub.WatchNodes(wire.WatchNodesRequest())
            await watch.read()
            assert await registry.end(number) == status
        await registry.start()
        async with dial(registry.address) as channel:
            reply = await RegistryServiceStub(channel).ListNodes(wire.ListNodesRequest())
    assert [(node.node_id, node.epoch, node.state, node.draining) for node in reply.nodes] == [
        ("a", 3, Node.STATE_READY, False),
        ("b", 3, Node.STATE_READY, True),
    ]


async def test_killed_together_with_the_metastore_it_comes_back_all_the_same(
    metastore: OwnProcess,
) -> None:
    arguments = ("--metastore", metastore.address, "--lease-s", "60")
    async with OwnProcess("kvplane_registry", free_address(), *arguments) as registry:
        async with dial(registry.address) as channel:
            node = Node(node_id="a", epoch=3, address="10.0.0.1:7710")
            stub = RegistryServiceStub(channel)
            await stub.Register(wire.RegisterRequest(node=node))
            await stub.Drain(wire.DrainRequest(node_id="a", draining=True))
        await metastore.end(signal.SIGKILL)
        await registry.end(signal.SIGKILL)
        await registry.start(health_is="NOT_SERVING")
        await metastore.start()
        await registry.until_health_is("SERVING")
        async with dial(registry.address) as channel:
            reply = await RegistryServiceStub(channel).ListNodes(wire.ListNodesRequest())
    assert [(node.node_id, node.draining) for node in reply.nodes] == [("a", True)]


async def test_two_on_one_address_are_refused_with_a_reason(metastore: OwnProcess) -> None:
    arguments = ("--metastore", metastore.address)
    async with OwnProcess("kvplane_registry", free_address(), *arguments) as first:
        second = OwnProcess("kvplane_registry", first.address, *arguments)
        # The first answers under the address of both: only the second's own end tells.
        with pytest.raises(RuntimeError, match="status 1"):
            await second.start(health_is="AWAY")
