"""What the router remembers: nodes, leases, sessions, decisions, predictions."""

from typing import Any

import pytest

from harness.routing import MODEL, chain, chat, model, node, step
from kvplane.common.v1 import node_pb2
from kvplane_common.metastore import MAX_KEY_BYTES
from kvplane_router.arrivals import MAX_ID_CHARACTERS, TENANT
from kvplane_router.fleet import Fleet
from kvplane_router.index import Home
from kvplane_router.predictions import Predictions
from kvplane_router.records import session_from, session_record
from kvplane_router.reservations import HOLD_MS, InFlight, Reservations
from kvplane_router.sessions import Session, Sessions, session_key

HOME = Home("a", MODEL, 1, 1)
PROMPT = chain(chat("be kind " * 100, "hello"))


# The fleet


def test_steps_add_change_and_remove_nodes() -> None:
    fleet = Fleet()
    fleet.apply(step(node("b"), node("a"), reset=True))
    fleet.apply(step(node("a", draining=True), node("c"), removed=("b",)))
    assert [(one.node_id, one.draining) for one in fleet.alive()] == [("a", True), ("c", False)]
    fleet.apply(step(node("d"), reset=True))
    assert [one.node_id for one in fleet.alive()] == ["d"]


def test_a_lost_node_is_known_but_not_alive() -> None:
    fleet = Fleet()
    fleet.apply(step(node("a", state=node_pb2.Node.STATE_LOST, address="h:1"), reset=True))
    assert not fleet.alive()
    assert fleet.addresses() == {"h:1"}


def test_a_figure_that_was_not_told_is_unknown_and_a_rate_of_zero_too() -> None:
    fleet = Fleet()
    bare = node_pb2.Model(name=MODEL, loaded=True, prefill_tokens_per_s=0.0)
    fleet.apply(step(node("a", bare), reset=True))
    found = fleet.alive()[0].models[MODEL]
    assert (found.prefill_tokens_per_s, found.service_ms, found.context_tokens) == (None,) * 3


@pytest.mark.parametrize("blocks", [None, 0, 7], ids=["not told", "none", "some"])
def test_a_count_of_zero_is_known(blocks: int | None) -> None:
    fleet = Fleet()
    fleet.apply(step(node("a", model(context_tokens=blocks), blocks=blocks), reset=True))
    found = fleet.alive()[0]
    assert (found.total_blocks, found.models[MODEL].context_tokens) == (blocks, blocks)


def test_a_block_without_a_size_is_unknown() -> None:
    fleet = Fleet()
    bare = node("a", blocks=7)
    bare.capacity.block_bytes = 0
    fleet.apply(step(bare, reset=True))
    assert fleet.alive()[0].block_bytes is None


def test_what_a_reset_leaves_out_is_gone_and_so_is_its_suspicion() -> None:
    fleet = Fleet()
    fleet.apply(step(node("a"), node("b"), reset=True))
    fleet.suspect("a", now_ms=0.0)
    assert fleet.apply(step(node("b"), reset=True)) == {"a"}
    assert not fleet.is_suspect("a", now_ms=1.0)


def test_a_suspect_is_cleared_by_its_next_step_but_not_by_that_of_another() -> None:
    fleet = Fleet()
    fleet.apply(step(node("a"), node("b"), reset=True))
    fleet.suspect("a", now_ms=0.0)
    fleet.apply(step(node("b")))
    assert fleet.is_suspect("a", now_ms=1.0)
    fleet.apply(step(node("a")))
    assert not fleet.is_suspect("a", now_ms=1.0)


# Reservations


def test_leases_add_up_and_drain_to_nothing() -> None:
    held = Reservations()
    one, other = held.take("a", MODEL, 100, 2), held.take("a", "other", 50, 3)
    assert held.in_flight("a", MODEL) == InFlight(1, 100, 5)
    assert held.in_flight("b", MODEL) == InFlight()
    held.prefilled(one, now_ms=7.0)
    assert held.in_flight("a", MODEL) == InFlight(1, 0, 5, answering_since_ms=(7.0,))
    assert held.release(one)
    assert held.release(other)
    assert held.in_flight("a", MODEL) == InFlight()
    assert len(held) == 0


def test_a_lease_is_released_once_only() -> None:
    held = Reservations()
    lease, _ = held.take("a", MODEL, 1, 1), held.take("a", MODEL, 1, 1)
    assert held.release(lease)
    assert not held.release(lease)
    held.prefilled(lease, now_ms=7.0)
    assert held.in_flight("a", MODEL) == InFlight(1, 1, 1)


def test_a_lease_that_was_handed_out_ends_by_its_name_or_by_its_time() -> None:
    held = Reservations()
    for name in ("r1", "r2"):
        held.hand_out(held.take("a", MODEL, 1, 1), name, now_ms=100.0)
    assert held.hand_back("a", "r1")
    assert not held.hand_back("a", "r1")
    held.expire(100.0 + HOLD_MS - 1)
    assert len(held) == 1
    held.expire(100.0 + HOLD_MS)
    assert len(held) == 0
    assert not held.hand_back("a", "r2")


def test_a_lease_that_was_handed_out_ends_when_its_node_counts_it() -> None:
    held = Reservations()
    held.hand_out(held.take("a", MODEL, 1, 1), "r1", now_ms=100.0)
    held.take("a", MODEL, 1, 1)  # of a request that this router sees to its end
    held.reported("b", made_ms=500.0)
    held.reported("a", made_ms=99.0)
    assert len(held) == 2
    held.reported("a", made_ms=100.0)
    assert len(held) == 1


# Sessions


def a_session(expire_ms: int = 100, session_id: str = "s", **told: Any) -> Session:
    values: dict[str, Any] = {"node_id": "a", "epoch": 1, **told}
    return Session(
        "default", session_id, MODEL, last_digest=b"8" * 8, last_end=9, tokens=3,
        expire_ms=expire_ms, **values,
    )  # fmt: skip


def test_an_id_with_a_slash_cannot_reach_another_tenants_session() -> None:
    assert session_key("t", "../u/x") == b"/session/t/../u/x"
    assert session_key("t/u", "x") != session_key("t", "u/x")


@pytest.mark.parametrize("character", "x/日😀")
def test_every_id_that_is_taken_fits_the_metastores_keys(character: str) -> None:
    assert len(session_key(TENANT, character * MAX_ID_CHARACTERS)) <= MAX_KEY_BYTES


def test_a_session_is_forgotten_at_its_time() -> None:
    sessions = Sessions()
    sessions.put(a_session())
    assert sessions.get("default", "s", now_ms=99) == a_session()
    assert sessions.get("default", "s", now_ms=100) is None
    assert sessions.get("other", "s", now_ms=0) is None
    assert sessions.expired(99) == []
    assert sessions.expired(100) == [a_session()]
    sessions.forget(a_session())
    assert len(sessions) == 0


def test_a_session_that_was_renewed_meanwhile_is_not_forgotten() -> None:
    sessions = Sessions()
    sessions.put(a_session(100))
    (old,) = sessions.expired(100)
    sessions.put(a_session(200))
    sessions.forget(old)
    assert sessions.get("default", "s", now_ms=100) == a_session(200)


def test_an_older_turn_that_comes_back_by_the_watch_does_not_replace_a_later_one() -> None:
    sessions = Sessions()
    sessions.put(a_session(200, node_id="b"))
    sessions.put(a_session(100, node_id="a"))
    found = sessions.get("default", "s", 0)
    assert found is not None
    assert found.node_id == "b"


def test_a_session_survives_its_record() -> None:
    assert session_from(session_record(a_session(session_id="a/b ü"))) == a_session(
        session_id="a/b ü"
    )


# Predictions


@pytest.mark.parametrize(
    ("measured", "collapsed"),
    [([0, 0, 0], True), ([9, 9, 9], True), ([0, 0, 10, 0, 0], False), ([0, 0], False)],
    ids=["three misses", "next to nothing", "a hit between", "only two"],
)
def test_predictions_collapse_after_three_misses_in_a_row(
    measured: list[int], collapsed: bool
) -> None:
    predictions = Predictions()
    told = [predictions.collapsed(HOME, 100, tokens) for tokens in measured]
    assert (True in told) is collapsed


def test_a_miss_that_was_predicted_is_no_collapse() -> None:
    predictions = Predictions()
    assert [predictions.collapsed(HOME, 0, 0) for _ in range(5)] == [False] * 5


def test_a_dead_homes_misses_are_forgotten() -> None:
    predictions = Predictions()
    assert [predictions.collapsed(HOME, 100, 0) for _ in range(2)] == [False, False]
    predictions.drop(lambda home: home == HOME)
    assert not predictions.collapsed(HOME, 100, 0)
