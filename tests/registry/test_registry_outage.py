"""The registry while the metastore is away."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from harness.registry import (
    LONG_S,
    Beats,
    Cluster,
    Watch,
    cluster,
    raises_on_the_wire,
)
from harness.services import health, until
from kvplane.common.v1.node_pb2 import Node
from kvplane_common.errors import (
    MetastoreUnavailableError,
    from_rpc,
)


async def test_without_the_metastore_what_is_known_stays_in_service(fleet: Cluster) -> None:
    await fleet.register(epoch=7)
    await fleet.metastore.stop()
    assert await Beats(fleet).beat() is False
    assert (await fleet.register(epoch=7)).state == Node.STATE_READY
    assert (await fleet.drain(draining=False)).draining is False
    assert await health(fleet.registry.address) == "SERVING"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda fleet: fleet.register("b"), id="a new node"),
        pytest.param(lambda fleet: fleet.register(epoch=8), id="a new epoch"),
        pytest.param(lambda fleet: fleet.register(labels={"zone": "c"}), id="new labels"),
        pytest.param(lambda fleet: fleet.drain(), id="a drain"),
        pytest.param(lambda fleet: fleet.deregister(), id="a goodbye"),
    ],
)
async def test_without_the_metastore_nothing_new_is_promised(
    fleet: Cluster, change: Callable[[Cluster], Awaitable[object]]
) -> None:
    before = await fleet.register(epoch=7)
    await fleet.metastore.stop()
    async with raises_on_the_wire(MetastoreUnavailableError):
        await change(fleet)
    after = (await fleet.nodes())["a"]
    assert (after.epoch, after.draining, after.labels) == (7, False, before.labels)
    await fleet.metastore.start()

    async def changed() -> bool:
        try:
            await change(fleet)
        except grpc.aio.AioRpcError as error:
            return not isinstance(from_rpc(error), MetastoreUnavailableError)
        return True

    await until(changed)


async def test_a_loss_without_the_metastore_is_pushed_now_and_written_later(
    hasty: Cluster,
) -> None:
    await hasty.register()
    await hasty.metastore.stop()
    async with aclosing(Watch(hasty.channel)) as watch:
        await watch.until_lost()
    assert (await hasty.register(epoch=7)).state == Node.STATE_READY

    async def lost() -> bool:
        return await hasty.state() == Node.STATE_LOST

    await until(lost)
    await hasty.metastore.start()

    async def remembered() -> bool:
        return (await hasty.records())["/node/a"].state == Node.STATE_LOST

    await until(remembered)


async def test_until_the_metastore_is_there_the_registry_answers_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, LONG_S) as fleet:
        await fleet.register()
        await fleet.registry.stop()
        await fleet.metastore.stop()
        await fleet.registry.start(health_is="NOT_SERVING")
        for refused in (fleet.nodes(), fleet.register(), Beats(fleet).beat(), fleet.drain()):
            async with raises_on_the_wire(MetastoreUnavailableError):
                await refused
        async with aclosing(Watch(fleet.channel)) as watch:
            waiting = asyncio.ensure_future(watch.step())
            await fleet.metastore.start()
            assert [node.node_id for node in (await waiting).nodes] == ["a"]
        assert await health(fleet.registry.address) == "SERVING"
        assert await health(fleet.registry.address, "kvplane.registry.v1.RegistryService") == (
            "SERVING"
        )
