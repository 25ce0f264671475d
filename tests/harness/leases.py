"""A fleet of leases whose clock a test moves."""

from typing import Any

from harness.clock import ManualClock
from kvplane.common.v1.node_pb2 import Node
from kvplane_registry.leases import Leases

LEASE_MS = 5_000
HERE, THERE = "10.0.0.1:7710", "10.0.0.2:7710"


def node(node_id: str = "a", epoch: int = 7, address: str = HERE, **fields: Any) -> Node:
    return Node(node_id=node_id, epoch=epoch, address=address, **fields)


class Fleet:
    """Leases with a clock that is moved in the steps of a living registry."""

    def __init__(self, *nodes: Node) -> None:
        self.clock = ManualClock()
        self.leases = Leases(self.clock, LEASE_MS)
        for one in nodes:
            self.register(one)

    def register(self, asked: Node) -> Node:
        return self.leases.register(self.leases.admit(asked))

    def pass_ms(self, ms: int, step_ms: int = 500) -> list[str]:
        lost = []
        for _ in range(0, ms, step_ms):
            self.clock.advance_ms(step_ms)
            lost += [one.node_id for one in self.leases.expire()]
        return lost

    def restart(self) -> None:
        remembered = self.leases.nodes()
        self.leases = Leases(self.clock, LEASE_MS)
        self.leases.restore(remembered)
