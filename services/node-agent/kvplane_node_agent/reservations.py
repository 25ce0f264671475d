"""Leases that are held for requests to come, each until it is used, given back or expired."""

from dataclasses import dataclass

from kvplane_common.errors import InvalidRequestError, ReservationUnknownError
from kvplane_node_agent.admission import Lease

DEFAULT_HOLD_MS = 10_000
MOST_HOLD_MS = 60_000


@dataclass(frozen=True, slots=True)
class Reservation:
    """A lease with a name and an end."""

    reservation_id: str
    request_id: str
    lease: Lease
    queue_ms: float
    expire_ms: float
    """By the monotonic clock."""
    expire_wall_ms: int


class Reservations:
    """The reservations that are held now."""

    def __init__(self) -> None:
        self._held: dict[str, Reservation] = {}
        self._by_request: dict[str, Reservation] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, reservation: Reservation) -> None:
        """Hold a reservation."""
        self._held[reservation.reservation_id] = reservation
        if reservation.request_id:
            self._by_request[reservation.request_id] = reservation

    def of_request(self, request_id: str, model: str) -> Reservation | None:
        """Return what a request already holds, or None.

        Raises InvalidRequestError if that is for another model.
        """
        known = self._by_request.get(request_id)
        if known is not None and known.lease.demand.model != model:
            raise InvalidRequestError(
                f"request_id {request_id!r} holds a reservation for model "
                f"{known.lease.demand.model!r}, not {model!r}; give each request an id of its own",
                field="request_id",
            )
        return known

    def take(self, reservation_id: str, model: str) -> Reservation:
        """Remove and return a reservation, to use it for `model`.

        Raises ReservationUnknownError if it is not held, or held for another model.
        """
        held = self._held.get(reservation_id)
        if held is None:
            raise ReservationUnknownError(
                f"no reservation {reservation_id!r}: it was used, given back or has expired; "
                "reserve again or leave reservation_id empty",
                reservation_id=reservation_id,
            )
        if held.lease.demand.model != model:
            raise ReservationUnknownError(
                f"reservation {reservation_id!r} is for model {held.lease.demand.model!r}, "
                f"not {model!r}",
                reservation_id=reservation_id,
            )
        return self._remove(held)

    def give_back(self, reservation_id: str) -> Reservation | None:
        """Remove and return a reservation, or None if it is not held."""
        held = self._held.get(reservation_id)
        return self._remove(held) if held else None

    def expired(self, now_ms: float) -> list[Reservation]:
        """Remove and return what was to be held no longer than `now_ms`, oldest first."""
        late = [one for one in self._held.values() if one.expire_ms <= now_ms]
        return [self._remove(one) for one in sorted(late, key=lambda one: one.expire_ms)]

    def next_expire_ms(self) -> float | None:
        """Return when the next one expires, by the monotonic clock; None if none is held."""
        return min((one.expire_ms for one in self._held.values()), default=None)

    def all(self) -> list[Reservation]:
        """Return what is held."""
        return list(self._held.values())

    def _remove(self, reservation: Reservation) -> Reservation:
        del self._held[reservation.reservation_id]
        self._by_request.pop(reservation.request_id, None)
        return reservation
