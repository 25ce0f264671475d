"""The rules of membership, without a server."""

from collections.abc import Callable

import pytest

from harness.leases import HERE, LEASE_MS, THERE, Fleet, node
from kvplane.common.v1.node_pb2 import Capacity, Load, Node
from kvplane_common.errors import (
    InvalidRequestError,
    KvplaneError,
    NodeIdTakenError,
    NodeNotFoundError,
    StaleEpochError,
)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        pytest.param(node(""), "1 to 63 characters", id="an empty node id"),
        pytest.param(node("a" * 64), "1 to 63 characters", id="a node id of 64 characters"),
        pytest.param(node("Box"), "1 to 63 characters", id="an upper case letter"),
        pytest.param(node("a/b"), "1 to 63 characters", id="a slash, which parts keys"),
        pytest.param(node("a\n"), "1 to 63 characters", id="a line end"),
        pytest.param(node("ä"), "1 to 63 characters", id="a letter beyond a to z"),
        pytest.param(node(epoch=0), "epoch 0", id="epoch 0"),
        pytest.param(node(address=""), "host:port", id="no address"),
        pytest.param(node(address="10.0.0.1"), "host:port", id="an address without a port"),
        pytest.param(node(address="10.0.0.1:0"), "no port", id="port 0"),
    ],
)
def test_a_malformed_node_is_refused(asked: Node, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Fleet().register(asked)


@pytest.mark.parametrize("node_id", ["a", "gpu-1.rack_2", "0", "a" * 63])
def test_a_node_id_may_have_letters_digits_dots_dashes_and_underscores(node_id: str) -> None:
    assert Fleet().register(node(node_id)).node_id == node_id


@pytest.mark.parametrize(
    ("asked", "error", "facts"),
    [
        pytest.param(node(epoch=7), None, {}, id="the same again"),
        pytest.param(node(epoch=8), None, {}, id="a greater epoch from the same address"),
        pytest.param(
            node(epoch=6), StaleEpochError, {"known_epoch": "7"}, id="an older epoch is stale"
        ),
        pytest.param(
            node(epoch=7, address=THERE),
            NodeIdTakenError,
            {"address": HERE},
            id="another address while the lease lives",
        ),
        pytest.param(
            node(epoch=8, address=THERE),
            NodeIdTakenError,
            {"address": HERE},
            id="another address with a greater epoch while the lease lives",
        ),
    ],
)
def test_who_may_register_over_a_live_lease(
    asked: Node, error: type[KvplaneError] | None, facts: dict[str, str]
) -> None:
    fleet = Fleet(node(epoch=7))
    if error is None:
        assert fleet.register(asked).epoch == asked.epoch
        return
    with pytest.raises(error) as raised:
        fleet.register(asked)
    assert facts.items() <= raised.value.facts.items()
    assert fleet.leases.get("a").epoch == 7
    assert fleet.leases.get("a").address == HERE


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        pytest.param(node(epoch=7), None, id="the same agent under its old epoch"),
        pytest.param(node(epoch=8), None, id="the same agent under a new epoch"),
        pytest.param(node(epoch=8, address=THERE), None, id="another address, greater epoch"),
        pytest.param(
            node(epoch=7, address=THERE), StaleEpochError, id="another address, same epoch"
        ),
        pytest.param(
            node(epoch=6, address=THERE), StaleEpochError, id="another address, older epoch"
        ),
        pytest.param(node(epoch=6), StaleEpochError, id="an older epoch"),
    ],
)
def test_who_may_register_over_a_lost_lease(asked: Node, error: type[KvplaneError] | None) -> None:
    fleet = Fleet(node(epoch=7))
    assert fleet.pass_ms(LEASE_MS) == ["a"]
    if error is None:
        assert fleet.register(asked).state == Node.STATE_READY
    else:
        with pytest.raises(error):
            fleet.register(asked)
        assert fleet.leases.get("a").state == Node.STATE_LOST


def test_a_taken_node_id_tells_how_long_the_lease_lives() -> None:
    fleet = Fleet(node())
    fleet.clock.advance_ms(1_000)
    with pytest.raises(NodeIdTakenError, match=r"lives for 4\.0 s more") as raised:
        fleet.leases.admit(node(epoch=8, address=THERE))
    assert raised.value.retry_after_ms == 4_001


def test_admitting_changes_nothing() -> None:
    fleet = Fleet(node(epoch=7))
    fleet.leases.admit(node(epoch=8))
    fleet.leases.admit(node("b"))
    assert [(one.node_id, one.epoch) for one in fleet.leases.nodes()] == [("a", 7)]


def test_what_the_caller_may_not_decide_is_ignored() -> None:
    asked = node(state=Node.STATE_LOST, draining=True)
    asked.lease_expire_time.FromMilliseconds(1)
    known = Fleet().register(asked)
    assert (known.state, known.draining) == (Node.STATE_READY, False)
    assert known.lease_expire_time.ToMilliseconds() == 1_000_000 + LEASE_MS


def test_registering_again_without_figures_keeps_those_of_the_same_epoch() -> None:
    fleet = Fleet(node(capacity=Capacity(engine="ollama"), load=Load(active_blocks=3)))
    same = fleet.register(node())
    assert (same.capacity.engine, same.load.active_blocks) == ("ollama", 3)
    assert not fleet.register(node(epoch=8)).HasField("capacity")


def test_a_heartbeat_keeps_a_node_for_one_lease_more() -> None:
    fleet = Fleet(node())
    assert fleet.pass_ms(LEASE_MS - 500) == []
    fleet.leases.renew("a", 7)
    assert fleet.pass_ms(LEASE_MS - 500) == []
    assert fleet.pass_ms(500) == ["a"]


def test_a_lost_node_is_told_once_and_stays_known_without_its_load() -> None:
    fleet = Fleet(node(capacity=Capacity(engine="ollama"), load=Load(active_blocks=3)))
    assert fleet.pass_ms(3 * LEASE_MS) == ["a"]
    lost = fleet.leases.get("a")
    assert (lost.state, lost.HasField("load")) == (Node.STATE_LOST, False)
    assert lost.capacity.engine == "ollama"
    assert lost.lease_expire_time.ToMilliseconds() == 1_000_000 + LEASE_MS


def test_time_in_which_the_registry_itself_stood_still_does_not_count() -> None:
    fleet = Fleet(node())
    fleet.pass_ms(2_000)
    assert fleet.pass_ms(60_000, step_ms=60_000) == []
    assert fleet.pass_ms(2_500) == []
    assert fleet.pass_ms(500) == ["a"]


@pytest.mark.parametrize(
    ("capacity", "load", "changed"),
    [
        pytest.param(None, None, False, id="nothing said"),
        pytest.param(Capacity(total_blocks=4), Load(active_blocks=1), False, id="the same again"),
        pytest.param(Capacity(total_blocks=5), None, True, id="another capacity"),
        pytest.param(None, Load(active_blocks=2), True, id="another load"),
        pytest.param(None, Load(), True, id="no load any more"),
    ],
)
def test_a_heartbeat_tells_whether_something_changed(
    capacity: Capacity | None, load: Load | None, changed: bool
) -> None:
    fleet = Fleet(node(capacity=Capacity(total_blocks=4), load=Load(active_blocks=1)))
    before = fleet.leases.get("a")
    assert fleet.leases.renew("a", 7, capacity, load) is changed
    after = fleet.leases.get("a")
    assert after.capacity == (before.capacity if capacity is None else capacity)
    assert after.load == (before.load if load is None else load)


def test_a_first_empty_load_is_a_change_since_unknown_is_not_zero() -> None:
    fleet = Fleet(node())
    assert fleet.leases.renew("a", 7, None, Load()) is True
    assert fleet.leases.get("a").HasField("load")


@pytest.mark.parametrize(
    ("node_id", "epoch", "error"),
    [
        pytest.param("b", 7, NodeNotFoundError, id="a node that never registered"),
        pytest.param("a", 6, StaleEpochError, id="an epoch that was replaced"),
        pytest.param("a", 8, NodeNotFoundError, id="an epoch that never registered"),
        pytest.param("", 7, NodeNotFoundError, id="no node id"),
    ],
)
def test_a_heartbeat_of_someone_else_renews_nothing(
    node_id: str, epoch: int, error: type[KvplaneError]
) -> None:
    fleet = Fleet(node(epoch=7))
    with pytest.raises(error):
        fleet.leases.renew(node_id, epoch)
    assert fleet.pass_ms(LEASE_MS) == ["a"]


def test_a_heartbeat_does_not_bring_a_lost_node_back() -> None:
    fleet = Fleet(node())
    fleet.pass_ms(LEASE_MS)
    with pytest.raises(NodeNotFoundError, match="register it again"):
        fleet.leases.renew("a", 7)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        pytest.param([], "none is known", id="no nodes"),
        pytest.param(["b", "a"], "known are a, b$", id="two"),
        pytest.param([f"n{i:02}" for i in range(23)], "n19 and 3 more$", id="many are cut"),
    ],
)
def test_an_unknown_node_is_answered_with_the_nodes_there_are(names: list[str], words: str) -> None:
    fleet = Fleet(*(node(name) for name in names))
    with pytest.raises(NodeNotFoundError, match=words):
        fleet.leases.set_draining("x", draining=True)


def _expired(fleet: Fleet) -> None:
    fleet.pass_ms(LEASE_MS)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(lambda fleet: fleet.register(node(epoch=8)), id="a restart of the node"),
        pytest.param(_expired, id="the loss of the node"),
        pytest.param(Fleet.restart, id="a restart of the registry"),
    ],
)
def test_a_drain_survives(event: Callable[[Fleet], object]) -> None:
    fleet = Fleet(node(epoch=7))
    fleet.leases.set_draining("a", draining=True)
    event(fleet)
    assert fleet.leases.get("a").draining
    assert fleet.register(node(epoch=9)).draining


def test_draining_does_not_renew_a_lease() -> None:
    fleet = Fleet(node())
    fleet.pass_ms(4_000)
    fleet.leases.set_draining("a", draining=True)
    assert fleet.pass_ms(1_000) == ["a"]


def test_after_a_restart_ready_nodes_have_one_lease_to_be_heard_and_lost_ones_stay_lost() -> None:
    fleet = Fleet()
    fleet.clock.advance_ms(60_000)
    fleet.leases.restore(
        [node("a", state=Node.STATE_READY), node("b", state=Node.STATE_LOST, epoch=3)]
    )
    assert [one.state for one in fleet.leases.nodes()] == [Node.STATE_READY, Node.STATE_LOST]
    fleet.leases.renew("a", 7)
    assert fleet.pass_ms(LEASE_MS - 500) == []
    assert fleet.pass_ms(500) == ["a"]
    assert not fleet.leases.get("b").HasField("lease_expire_time")


@pytest.mark.parametrize(
    ("epoch", "stale"),
    [
        pytest.param(0, False, id="whichever"),
        pytest.param(6, True, id="an older one"),
        pytest.param(7, False, id="the known one"),
        pytest.param(8, False, id="one that never registered"),
    ],
)
def test_only_an_older_epoch_may_not_say_goodbye(epoch: int, stale: bool) -> None:
    fleet = Fleet(node(epoch=7))
    if stale:
        with pytest.raises(StaleEpochError) as raised:
            fleet.leases.check_goodbye("a", epoch)
        assert raised.value.facts["known_epoch"] == "7"
    else:
        fleet.leases.check_goodbye("a", epoch)


def test_a_forgotten_node_is_gone_and_forgetting_again_is_no_error() -> None:
    fleet = Fleet(node())
    fleet.leases.forget("a")
    fleet.leases.forget("a")
    assert fleet.leases.nodes() == []
    fleet.leases.check_goodbye("a", 1)
    assert fleet.register(node(epoch=1)).epoch == 1


def test_a_node_that_is_lost_early_holds_its_id_no_longer() -> None:
    fleet = Fleet(node(epoch=7))
    assert fleet.leases.lose("a").lease_expire_time.ToMilliseconds() == 1_000_000
    assert fleet.register(node(epoch=8, address=THERE)).address == THERE


def test_nodes_handed_out_do_not_change_afterwards() -> None:
    fleet = Fleet(node(load=Load(active_blocks=1)))
    before = fleet.leases.get("a")
    fleet.leases.renew("a", 7, None, Load(active_blocks=2))
    fleet.leases.set_draining("a", draining=True)
    assert (before.load.active_blocks, before.draining) == (1, False)
    before.load.active_blocks = 99
    assert fleet.leases.get("a").load.active_blocks == 2
