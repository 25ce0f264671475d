"""What this router has sent to each node and not heard the end of."""

from collections.abc import Callable
from dataclasses import dataclass, replace

HOLD_MS = 1_000.0
"""How long a lease that was handed out counts if its node says nothing more. A node counts its
reservations itself and tells of a change within 200 ms: silence means that it has told of this one
already, or that it is over."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one request takes on one node until it is released."""

    number: int
    node_id: str
    model: str
    uncached_tokens: int
    """Prompt tokens that the node has yet to evaluate for it."""
    blocks: int
    """KV blocks that it needs. 0 when they are not counted there."""
    answering_since_ms: float | None = None
    """When its first token came. None: it still waits, or its prompt is being evaluated."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """What the leases of one node and model add up to; `blocks` are those of the whole node."""

    requests: int = 0
    uncached_tokens: int = 0
    blocks: int = 0
    answering_since_ms: tuple[float, ...] = ()
    """When the first token came of each answer that runs now."""


@dataclass(frozen=True, slots=True)
class _HandedOut:
    lease: Lease
    at_ms: float


class Reservations:
    """The leases that are held now. At rest there are none.

    A lease ends exactly once: by `release`, or, when it was handed out to a caller whose request
    this router does not see, by `hand_back`, `reported` or `expire`.
    """

    def __init__(self) -> None:
        self._numbers = 0
        self._by_node: dict[str, dict[int, Lease]] = {}
        self._named: dict[tuple[str, str], _HandedOut] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_node.values()))

    @property
    def newest(self) -> int:
        """The number of the lease that was taken last; 0 before the first."""
        return self._numbers

    def take(self, node_id: str, model: str, uncached_tokens: int, blocks: int) -> Lease:
        """Hold what a request will need on a node."""
        self._numbers += 1
        lease = Lease(self._numbers, node_id, model, uncached_tokens, blocks)
        self._by_node.setdefault(node_id, {})[lease.number] = lease
        return lease

    def prefilled(self, lease: Lease, now_ms: float) -> None:
        """Note that the request's prompt is evaluated: nothing of it is pending any more."""
        held = self._by_node.get(lease.node_id, {})
        if lease.number in held:
            held[lease.number] = replace(lease, uncached_tokens=0, answering_since_ms=now_ms)

    def release(self, lease: Lease) -> bool:
        """Give a lease back; tell whether it was still held."""
        held = self._by_node.get(lease.node_id, {})
        was_held = held.pop(lease.number, None) is not None
        if was_held and not held:
            del self._by_node[lease.node_id]
        return was_held

    def hand_out(self, lease: Lease, reservation_id: str, now_ms: float) -> None:
        """Let a lease live under the node's name for it, until the node itself counts it."""
        self._named[lease.node_id, reservation_id] = _HandedOut(lease, now_ms)

    def hand_back(self, node_id: str, reservation_id: str) -> bool:
        """Release a lease that was handed out; tell whether it was still held."""
        out = self._named.pop((node_id, reservation_id), None)
        return out is not None and self.release(out.lease)

    def reported(self, node_id: str, made_ms: float) -> None:
        """Release what was handed out before the node made a report: it counts that, or its end."""
        self._take_back(lambda out: out.lease.node_id == node_id and out.at_ms <= made_ms)

    def expire(self, now_ms: float) -> None:
        """Release the leases that were handed out and have counted for long enough."""
        self._take_back(lambda out: out.at_ms + HOLD_MS <= now_ms)

    def in_flight(self, node_id: str, model: str) -> InFlight:
        """Return what is held on a node for a model."""
        held = self._by_node.get(node_id, {}).values()
        same = [lease for lease in held if lease.model == model]
        return InFlight(
            requests=len(same),
            uncached_tokens=sum(lease.uncached_tokens for lease in same),
            blocks=sum(lease.blocks for lease in held),
            answering_since_ms=tuple(
                lease.answering_since_ms for lease in same if lease.answering_since_ms is not None
            ),
        )

    def _take_back(self, is_due: Callable[[_HandedOut], bool]) -> None:
        for name in [name for name, out in self._named.items() if is_due(out)]:
            self.hand_back(*name)
