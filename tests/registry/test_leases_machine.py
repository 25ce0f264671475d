"""The rules of membership under any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from harness.leases import HERE, THERE, Fleet, node
from kvplane.common.v1.node_pb2 import Load, Node
from kvplane_common.errors import NodeIdTakenError, NodeNotFoundError, StaleEpochError


class LeasesMachine(RuleBasedStateMachine):
    """Whatever agents and operators do: epochs only grow, and drains are kept."""

    ids = st.sampled_from(["a", "b"])
    epochs = st.integers(min_value=1, max_value=5)

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()
        self.epochs_seen: dict[str, int] = {}
        self.drains: dict[str, bool] = {}

    @rule(node_id=ids, epoch=epochs, address=st.sampled_from([HERE, THERE]))
    def register(self, node_id: str, epoch: int, address: str) -> None:
        try:
            self.fleet.register(node(node_id, epoch, address))
        except (StaleEpochError, NodeIdTakenError):
            return
        assert epoch >= self.epochs_seen.get(node_id, 0)
        self.epochs_seen[node_id] = epoch

    @rule(node_id=ids, epoch=epochs)
    def renew(self, node_id: str, epoch: int) -> None:
        try:
            self.fleet.leases.renew(node_id, epoch, None, Load(active_blocks=epoch))
        except (StaleEpochError, NodeNotFoundError):
            return
        assert self.epochs_seen[node_id] == epoch

    @rule(node_id=ids, draining=st.booleans())
    def drain(self, node_id: str, draining: bool) -> None:
        if node_id in self.epochs_seen:
            self.fleet.leases.set_draining(node_id, draining)
            self.drains[node_id] = draining

    @rule(node_id=ids)
    def forget(self, node_id: str) -> None:
        self.fleet.leases.forget(node_id)
        self.epochs_seen.pop(node_id, None)
        self.drains.pop(node_id, None)

    @rule(steps=st.integers(min_value=1, max_value=12))
    def wait(self, steps: int) -> None:
        self.fleet.pass_ms(steps * 500)

    @rule()
    def restart(self) -> None:
        self.fleet.restart()

    @invariant()
    def known_nodes_are_as_told(self) -> None:
        known = {one.node_id: one for one in self.fleet.leases.nodes()}
        assert {name: one.epoch for name, one in known.items()} == self.epochs_seen
        for name, one in known.items():
            assert one.draining == self.drains.get(name, False)
            assert one.state in (Node.STATE_READY, Node.STATE_LOST)


TestLeasesMachine = LeasesMachine.TestCase
TestLeasesMachine.settings = settings(max_examples=50, deadline=None)
