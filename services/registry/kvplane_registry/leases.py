"""Who is a member of the fleet, and whose lease is alive: the rules, and nothing else.

A node's life: `register` makes it READY with a lease, `renew` keeps the lease alive, `expire` makes
it LOST. A LOST node stays known, with its drain, until it registers again or is forgotten.

Nodes handed out are never changed afterwards: each change makes a new message.
"""

from dataclasses import dataclass

from kvplane.common.v1 import node_pb2
from kvplane_common.addresses import check_address
from kvplane_common.clock import Clock
from kvplane_common.errors import (
    InvalidRequestError,
    NodeIdTakenError,
    NodeNotFoundError,
    StaleEpochError,
)
from kvplane_common.node_ids import check_node_id

Node = node_pb2.Node

_NAMED_IN_ERRORS = 20


@dataclass(frozen=True, slots=True)
class _Lease:
    """A node, and the monotonic moment at which its lease ends or has ended."""

    node: Node
    end_ms: float

    @property
    def ready(self) -> bool:
        """True until the end of the lease has been noticed."""
        return self.node.state == Node.STATE_READY


class Leases:
    """Every node that is known, and its lease of `lease_ms` milliseconds."""

    def __init__(self, clock: Clock, lease_ms: float) -> None:
        self._clock = clock
        self._lease_ms = lease_ms
        self._leases: dict[str, _Lease] = {}
        self._checked_ms = clock.monotonic_ms()

    def restore(self, nodes: list[Node]) -> None:
        """Take over what was remembered before a restart; READY nodes get one lease as grace."""
        self._checked_ms = self._clock.monotonic_ms()
        for node in nodes:
            if node.state == Node.STATE_READY:
                self._grant(node, self._new_end_ms())
            else:
                self._set(node, self._checked_ms)

    def nodes(self) -> list[Node]:
        """Return every node, lost ones included, by node id."""
        return [_copy(self._leases[node_id].node) for node_id in sorted(self._leases)]

    def find(self, node_id: str) -> Node | None:
        """Return a node, or None where there is no such one."""
        lease = self._leases.get(node_id)
        return _copy(lease.node) if lease else None

    def get(self, node_id: str) -> Node:
        """Return a node. Raises NodeNotFoundError, which names the nodes there are."""
        node = self.find(node_id)
        if node is None:
            raise NodeNotFoundError(f"no node is named {node_id!r}; {self._names()}")
        return node

    def admit(self, asked: Node) -> Node:
        """Return `asked` as it would be known once registered; nothing changes yet.

        Raises InvalidRequestError, NodeIdTakenError or StaleEpochError.
        """
        _check(asked)
        known = self._leases.get(asked.node_id)
        if known is not None:
            self._check_against(known, asked)
        node = Node(
            node_id=asked.node_id,
            address=asked.address,
            labels=asked.labels,
            epoch=asked.epoch,
            state=Node.STATE_READY,
            draining=known is not None and known.node.draining,
        )
        if known is not None and known.node.epoch == asked.epoch:
            node = _with(node, *_measures(known.node))
        return _with(node, *_measures(asked))

    def register(self, node: Node) -> Node:
        """Let an admitted node in, with a fresh lease, and return it."""
        return self._grant(node, self._new_end_ms())

    def renew(
        self,
        node_id: str,
        epoch: int,
        capacity: node_pb2.Capacity | None = None,
        load: node_pb2.Load | None = None,
    ) -> bool:
        """Start a node's lease anew, and tell whether its capacity or load changed.

        None leaves either as it was. Raises NodeNotFoundError (also for a lost node and for an
        epoch that never registered) or StaleEpochError; the agent registers again after each.
        """
        self.get(node_id)
        before = self._leases[node_id].node
        if epoch < before.epoch:
            raise _stale(before, epoch)
        if epoch > before.epoch or before.state != Node.STATE_READY:
            raise NodeNotFoundError(
                f"node {node_id!r} holds no lease for epoch {epoch}: its epoch is {before.epoch}, "
                f"its state {Node.State.Name(before.state)}; register it again",
                known_epoch=before.epoch,
            )
        node = _with(before, capacity, load)
        self._grant(node, self._new_end_ms())
        return node is not before

    def expire(self) -> list[Node]:
        """Turn the nodes whose lease has ended to LOST, and return them.

        To be called several times in a lease. A gap of over half a lease means that this process
        itself stood still and heard nobody, so the gap does not count against the nodes.
        """
        now_ms = self._clock.monotonic_ms()
        gap_ms, self._checked_ms = now_ms - self._checked_ms, now_ms
        if gap_ms > self._lease_ms / 2:
            self._extend(gap_ms)
        ended = [one for one in self._leases.values() if one.ready and one.end_ms <= now_ms]
        return [self.lose(lease.node.node_id) for lease in ended]

    def lose(self, node_id: str) -> Node:
        """Turn a node to LOST and return it."""
        lease, now_ms = self._leases[node_id], self._clock.monotonic_ms()
        node = _copy(lease.node)
        node.state = Node.STATE_LOST
        node.ClearField("load")
        if lease.end_ms > now_ms:
            return self._grant(node, now_ms)
        return self._set(node, lease.end_ms)

    def set_draining(self, node_id: str, draining: bool) -> Node:
        """Keep new work away from a node, or let it come again. Raises NodeNotFoundError."""
        self.get(node_id)
        lease = self._leases[node_id]
        node = _copy(lease.node)
        node.draining = draining
        return self._set(node, lease.end_ms)

    def check_goodbye(self, node_id: str, epoch: int) -> None:
        """Raise StaleEpochError where a newer epoch than `epoch` is known; 0 passes always."""
        known = self._leases.get(node_id)
        if known is not None and 0 < epoch < known.node.epoch:
            raise _stale(known.node, epoch)

    def forget(self, node_id: str) -> None:
        """Forget a node, if it is known."""
        self._leases.pop(node_id, None)

    def _check_against(self, known: _Lease, asked: Node) -> None:
        moved = known.node.address != asked.address
        left_ms = known.end_ms - self._clock.monotonic_ms()
        if moved and known.ready and left_ms > 0:
            raise NodeIdTakenError(
                f"node id {asked.node_id!r} belongs to the agent at {known.node.address}, whose "
                f"lease lives for {left_ms / 1000:.1f} s more; choose another node id, or stop it",
                retry_after_ms=int(left_ms) + 1,
                address=known.node.address,
            )
        # Two agents must never write cache records under one epoch.
        if asked.epoch < known.node.epoch or (moved and asked.epoch == known.node.epoch):
            raise _stale(known.node, asked.epoch)

    def _extend(self, gap_ms: float) -> None:
        for lease in [lease for lease in self._leases.values() if lease.ready]:
            self._grant(lease.node, lease.end_ms + gap_ms)

    def _grant(self, node: Node, end_ms: float) -> Node:
        left_ms = end_ms - self._clock.monotonic_ms()
        node = _copy(node)
        node.lease_expire_time.FromMilliseconds(int(self._clock.now_ms() + left_ms))
        return self._set(node, end_ms)

    def _set(self, node: Node, end_ms: float) -> Node:
        self._leases[node.node_id] = _Lease(node, end_ms)
        return _copy(node)

    def _new_end_ms(self) -> float:
        return self._clock.monotonic_ms() + self._lease_ms

    def _names(self) -> str:
        names = sorted(self._leases)
        more = f" and {len(names) - _NAMED_IN_ERRORS} more" if len(names) > _NAMED_IN_ERRORS else ""
        return (
            f"known are {', '.join(names[:_NAMED_IN_ERRORS])}{more}" if names else "none is known"
        )


def _check(node: Node) -> None:
    try:
        check_node_id(node.node_id)
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    if node.epoch == 0:
        raise InvalidRequestError(
            f"node {node.node_id!r} registers with epoch 0; epochs begin at 1"
        )
    try:
        check_address(node.address)
    except ValueError as error:
        raise InvalidRequestError(f"the address of node {node.node_id!r}: {error}") from error


def _stale(known: Node, epoch: int) -> StaleEpochError:
    return StaleEpochError(
        f"node {known.node_id!r} is known at {known.address} with epoch {known.epoch}, so epoch "
        f"{epoch} is stale; register with a greater one",
        known_epoch=known.epoch,
        epoch=epoch,
    )


def _measures(node: Node) -> tuple[node_pb2.Capacity | None, node_pb2.Load | None]:
    return (
        node.capacity if node.HasField("capacity") else None,
        node.load if node.HasField("load") else None,
    )


def _with(node: Node, capacity: node_pb2.Capacity | None, load: node_pb2.Load | None) -> Node:
    same_capacity = capacity is None or (node.HasField("capacity") and capacity == node.capacity)
    same_load = load is None or (node.HasField("load") and load == node.load)
    if same_capacity and same_load:
        return node
    changed = _copy(node)
    if capacity is not None:
        changed.capacity.CopyFrom(capacity)
    if load is not None:
        changed.load.CopyFrom(load)
    return changed


def _copy(node: Node) -> Node:
    copy = Node()
    copy.CopyFrom(node)
    return copy
