"""Reservations, by a clock that only the test moves."""

import pytest

from kvplane_common.errors import InvalidRequestError, ReservationUnknownError
from kvplane_node_agent.admission import Lease
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.reservations import Reservation, Reservations


def reservation(name: str, expire_ms: float = 100.0, request_id: str = "") -> Reservation:
    lease = Lease(Demand("m", None, None, 5), 1, 1, 0, None, 0)
    return Reservation(name, request_id, lease, 0.0, expire_ms, 0)


def test_a_reservation_is_taken_once() -> None:
    held = Reservations()
    held.add(reservation("r", request_id="q"))
    known = held.of_request("q", "m")
    assert held.take("r", "m") is known
    assert held.of_request("q", "m") is None
    with pytest.raises(ReservationUnknownError, match="reserve again"):
        held.take("r", "m")
    assert held.give_back("r") is None


def test_a_reservation_for_another_model_stays_held() -> None:
    held = Reservations()
    held.add(reservation("r"))
    with pytest.raises(ReservationUnknownError, match="for model 'm'"):
        held.take("r", "other")
    assert len(held) == 1


def test_a_request_id_names_one_model() -> None:
    held = Reservations()
    held.add(reservation("r", request_id="q"))
    with pytest.raises(InvalidRequestError, match="for model 'm', not 'other'"):
        held.of_request("q", "other")


def test_reservations_expire_oldest_first() -> None:
    held = Reservations()
    for name, expire_ms in (("late", 300.0), ("second", 200.0), ("first", 100.0)):
        held.add(reservation(name, expire_ms))
    assert held.next_expire_ms() == 100
    assert not held.expired(99)
    assert [one.reservation_id for one in held.expired(200)] == ["first", "second"]
    assert held.next_expire_ms() == 300
    assert [one.reservation_id for one in held.all()] == ["late"]
    held.give_back("late")
    assert held.next_expire_ms() is None


def test_requests_without_a_name_share_nothing() -> None:
    held = Reservations()
    held.add(reservation("a"))
    held.add(reservation("b"))
    assert held.of_request("", "m") is None
    assert len(held) == 2
