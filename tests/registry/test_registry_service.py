"""The registry through real gRPC, with a real metastore behind it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from structlog.testing import capture_logs

from harness.registry import (
    HERE,
    LONG_S,
    THERE,
    Beats,
    Cluster,
    Watch,
    raises_on_the_wire,
)
from harness.services import until
from kvplane.common.v1.node_pb2 import Capacity, Load, Node
from kvplane.registry.v1 import registry_pb2 as wire
from kvplane_common.channels import dial
from kvplane_common.errors import (
    InvalidRequestError,
    NodeIdTakenError,
    NodeNotFoundError,
    StaleEpochError,
    UnavailableError,
)
from kvplane_common.keys import cache_key
from kvplane_common.metastore import MetastoreClient, put


async def test_a_registered_node_is_known_and_remembered(fleet: Cluster) -> None:
    request = Node(node_id="a", epoch=7, address=HERE, labels={"zone": "b"}, load=Load())
    reply = await fleet.stub.Register(wire.RegisterRequest(node=request))
    assert reply.lease_duration.ToTimedelta().total_seconds() == LONG_S
    assert reply.node == (await fleet.nodes())["a"]
    assert reply.node.HasField("lease_expire_time")
    remembered = (await fleet.records())["/node/a"]
    assert (remembered.address, remembered.epoch, remembered.state) == (HERE, 7, Node.STATE_READY)
    assert dict(remembered.labels) == {"zone": "b"}
    assert not remembered.HasField("load")
    assert not remembered.HasField("lease_expire_time")


async def test_refusals_reach_the_agent_with_their_facts(fleet: Cluster) -> None:
    await fleet.register(epoch=7)
    async with raises_on_the_wire(StaleEpochError, known_epoch="7"):
        await fleet.register(epoch=6)
    async with raises_on_the_wire(NodeIdTakenError, address=HERE):
        await fleet.register(epoch=8, address=THERE)
    async with raises_on_the_wire(InvalidRequestError):
        await fleet.register(node_id="A box")
    async with raises_on_the_wire(StaleEpochError, known_epoch="7"):
        await fleet.deregister(epoch=6)
    async with raises_on_the_wire(NodeNotFoundError):
        await fleet.drain("b")
    assert list(await fleet.nodes()) == ["a"]


async def test_nodes_are_listed_by_node_id(fleet: Cluster) -> None:
    for node_id in ("c", "a", "b"):
        await fleet.register(node_id)
    assert list(await fleet.nodes()) == ["a", "b", "c"]


async def test_a_heartbeat_is_answered_with_the_drain_and_its_figures_are_pushed(
    fleet: Cluster,
) -> None:
    await fleet.register()
    beats = Beats(fleet)
    async with aclosing(Watch(fleet.channel)) as watch:
        await watch.step()
        assert await beats.beat() is False
        assert await beats.beat(load=Load(active_blocks=4)) is False
        await watch.step()
        assert watch.nodes["a"].load.active_blocks == 4
        await fleet.drain()
        await watch.step()
        assert watch.nodes["a"].draining
        assert await beats.beat(capacity=Capacity(engine="ollama")) is True
        await watch.step()
    assert watch.nodes["a"].capacity.engine == "ollama"
    assert watch.nodes["a"].load.active_blocks == 4
    await beats.end()
    assert await fleet.state() == Node.STATE_READY


@pytest.mark.parametrize(
    ("node_id", "epoch", "kind"),
    [
        pytest.param("b", 7, NodeNotFoundError, id="a node that is not registered"),
        pytest.param("a", 6, StaleEpochError, id="an epoch that was replaced"),
    ],
)
async def test_a_heartbeat_that_cannot_renew_ends_the_stream(
    fleet: Cluster, node_id: str, epoch: int, kind: type[Exception]
) -> None:
    await fleet.register(epoch=7)
    async with raises_on_the_wire(kind):
        await Beats(fleet).beat(node_id, epoch)


async def test_a_watch_begins_with_a_reset_even_without_nodes(fleet: Cluster) -> None:
    async with aclosing(Watch(fleet.channel)) as watch:
        step = await watch.step()
        assert step == wire.WatchNodesResponse(reset=True)
        await fleet.register()
        assert [node.node_id for node in (await watch.step()).nodes] == ["a"]
        await fleet.deregister()
        assert list((await watch.step()).removed_node_ids) == ["a"]


async def test_a_silent_node_is_pushed_as_lost_and_remembered_so(hasty: Cluster) -> None:
    await hasty.register()
    async with aclosing(Watch(hasty.channel)) as watch:
        await watch.until_lost()

    async def remembered() -> bool:
        return (await hasty.records())["/node/a"].state == Node.STATE_LOST

    await until(remembered)
    async with raises_on_the_wire(NodeNotFoundError):
        await Beats(hasty).beat()
    back = await hasty.register(epoch=7)
    assert (back.epoch, back.state) == (7, Node.STATE_READY)


async def test_a_node_that_beats_lives_on_beside_one_that_does_not(hasty: Cluster) -> None:
    await hasty.register("a")
    await hasty.register("b", address=THERE)
    beats = Beats(hasty)

    async def b_is_lost() -> bool:
        await beats.beat("a")
        return await hasty.state("b") == Node.STATE_LOST

    await until(b_is_lost)
    assert await hasty.state("a") == Node.STATE_READY


async def test_a_deregistered_node_is_forgotten_and_that_is_idempotent(fleet: Cluster) -> None:
    await fleet.register()
    async with dial(fleet.metastore.address) as channel:
        client = MetastoreClient(channel)
        keys = [cache_key(name, "m", b"x") for name in ("a", "ab")]
        await client.write([put(key, b"") for key in keys])
        await fleet.deregister()
        await fleet.deregister()
        left = [kv.key for kv in (await client.range(b"/cache/"))[0]]
    assert left == keys[1:]
    assert await fleet.nodes() == {}
    assert await fleet.records() == {}


async def test_a_node_that_says_goodbye_is_lost_at_once_and_remembered(fleet: Cluster) -> None:
    await fleet.register(epoch=7)
    await fleet.deregister(epoch=7)
    await fleet.deregister(epoch=7)
    assert await fleet.state() == Node.STATE_LOST
    assert (await fleet.records())["/node/a"].state == Node.STATE_LOST


async def test_a_drained_node_that_says_goodbye_comes_back_drained(fleet: Cluster) -> None:
    await fleet.register(epoch=7)
    await fleet.drain()
    await fleet.deregister(epoch=7)
    assert await fleet.state() == Node.STATE_LOST
    assert (await fleet.records())["/node/a"].state == Node.STATE_LOST
    assert (await fleet.register(epoch=8, address=THERE)).draining
    await fleet.deregister()
    assert await fleet.nodes() == {}


async def test_nodes_drains_and_losses_survive_a_registry_restart(fleet: Cluster) -> None:
    await fleet.register("a")
    await fleet.register("b", address=THERE)
    await fleet.drain("b")
    await fleet.register("c", address="10.0.0.3:7710")
    await fleet.drain("c")
    await fleet.deregister("c", epoch=7)
    await fleet.registry.stop()
    await fleet.registry.start()
    after = await fleet.nodes()
    assert {name: (node.state, node.draining) for name, node in after.items()} == {
        "a": (Node.STATE_READY, False),
        "b": (Node.STATE_READY, True),
        "c": (Node.STATE_LOST, True),
    }
    assert await Beats(fleet).beat("b") is True


async def test_a_restart_grants_one_lease_and_no_more(hasty: Cluster) -> None:
    await hasty.register("a")
    await hasty.registry.stop()
    await hasty.registry.start()
    assert await hasty.state("a") == Node.STATE_READY

    async def lost() -> bool:
        return await hasty.state("a") == Node.STATE_LOST

    await until(lost)


async def test_a_watcher_finds_back_after_a_registry_restart(fleet: Cluster) -> None:
    await fleet.register("a")
    with capture_logs() as logs:
        async with aclosing(Watch(fleet.channel)) as watch:
            await watch.step()
            await fleet.registry.stop()
            waiting = asyncio.ensure_future(watch.until(lambda seen: seen.resets == 2))
            await until(lambda: _logged(logs, "the registry is away"))
            await fleet.registry.start()
            await waiting
            assert list(watch.nodes) == ["a"]
    events = [log["event"] for log in logs if log["event"].startswith("the registry is")]
    assert events == ["the registry is away; going on with the nodes known", "the registry is back"]


async def _logged(logs: Sequence[Mapping[str, Any]], words: str) -> bool:
    return any(log["event"].startswith(words) for log in logs)


async def test_a_stop_ends_watches_and_heartbeats_at_once(fleet: Cluster) -> None:
    await fleet.register()
    beats = Beats(fleet)
    await beats.beat()
    watch = fleet.stub.WatchNodes(wire.WatchNodesRequest())
    await watch.read()
    # Far below the drain of ten seconds, which open streams would use up.
    await asyncio.wait_for(fleet.registry.stop(), 5)
    async with raises_on_the_wire(UnavailableError):
        await watch.read()
    async with raises_on_the_wire(UnavailableError):
        await beats.answer()


async def test_a_heartbeat_stream_that_is_cancelled_leaves_the_lease(fleet: Cluster) -> None:
    await fleet.register()
    call = fleet.stub.Heartbeat()
    await call.write(wire.HeartbeatRequest(node_id="a", epoch=7))
    await call.read()
    call.cancel()
    assert await fleet.state() == Node.STATE_READY
