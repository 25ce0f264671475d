"""Requests that have ended, but that their node's last report still counts.

A node reports its load at most every 200 ms, so the next turn of a conversation is here before the
report that the last one has ended. Without this a node would look busy with what it has done.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvplane_router.fleet import Model, Node
from kvplane_router.reservations import InFlight, Lease

LATE_MS = 100.0
"""How long after a request's end a report may come that was made before it."""


@dataclass(frozen=True, slots=True)
class _Ended:
    lease: Lease
    ended_ms: float


class Overtaken:
    """The ended leases of each node that its last report may count, or one still under way."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        """For each node the newest lease at its last report: no later one is in it."""
        self._ended: dict[str, list[_Ended]] = {}

    def ended(self, lease: Lease, now_ms: float) -> None:
        """Note that a request has ended."""
        newest = self._newest.get(lease.node_id, 0)
        ended = self._ended.setdefault(lease.node_id, [])
        ended[:] = [one for one in ended if one.lease.number <= newest or _is_late(one, now_ms)]
        ended.append(_Ended(lease, now_ms))

    def reported(self, node_id: str, newest: int, now_ms: float) -> None:
        """Note a report of a node's load; `newest` is the number of the newest lease of all."""
        self._newest[node_id] = newest
        late = [one for one in self._ended.pop(node_id, ()) if _is_late(one, now_ms)]
        if late:
            self._ended[node_id] = late

    def forget(self, node_id: str) -> None:
        """Forget a node that is gone."""
        self._newest.pop(node_id, None)
        self._ended.pop(node_id, None)

    def discounted(self, node: Node, model: Model) -> tuple[Node, Model]:
        """Return both without what has ended of the load that the node reported."""
        mine = self._of(node.node_id, model.name)
        if not mine.requests:
            return node, model
        in_flight = max(0, model.in_flight - mine.requests)
        others = sum(one.in_flight for one in node.models.values()) - model.in_flight
        # What a request held there is known only roughly; that nobody is left, exactly.
        active_blocks = max(0, node.active_blocks - mine.blocks) if in_flight or others else 0
        pending_tokens = max(0, model.pending_tokens - mine.uncached_tokens) if in_flight else 0
        return (
            replace(node, active_blocks=active_blocks),
            replace(model, in_flight=in_flight, pending_tokens=pending_tokens),
        )

    def _of(self, node_id: str, model: str) -> InFlight:
        counted = list(self._counted(node_id))
        same = [lease for lease in counted if lease.model == model]
        return InFlight(
            requests=len(same),
            uncached_tokens=sum(lease.uncached_tokens for lease in same),
            blocks=sum(lease.blocks for lease in counted),
        )

    def _counted(self, node_id: str) -> Iterator[Lease]:
        newest = self._newest.get(node_id, 0)
        for one in self._ended.get(node_id, ()):
            if one.lease.number <= newest:
                yield one.lease


def _is_late(one: _Ended, now_ms: float) -> bool:
    return now_ms - one.ended_ms < LATE_MS
