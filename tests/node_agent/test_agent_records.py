"""Who may write the records of a node, and when."""

import pytest

from harness.clock import ManualClock
from kvplane.common.v1 import generation_pb2, records_pb2
from kvplane_common.chains import Chain
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.engines.base import EngineModel, Finished
from kvplane_node_agent.ledger import Ledger, Limits
from kvplane_node_agent.memory import Memory
from kvplane_node_agent.node import Node
from kvplane_node_agent.records import Records

MODEL = EngineModel("m", loaded=True, slots=1, context_tokens=100, kv_bytes_per_token=1.0)
OTHERS = b"/cache/n1/m/another"


class Store:
    """Applies changes at once."""

    def __init__(self) -> None:
        self.known = {OTHERS: b"", b"/cache/n2/m/x": b""}
        self.cleared = 0

    def put(self, key: bytes, value: bytes) -> None:
        self.known[key] = value

    def delete(self, key: bytes) -> None:
        self.known.pop(key, None)

    def delete_prefix(self, prefix: bytes) -> None:
        self.cleared += 1
        self.known = {key: it for key, it in self.known.items() if not key.startswith(prefix)}

    def epochs(self) -> list[int]:
        own = [it for key, it in self.known.items() if key.startswith(b"/cache/n1/m/") and it]
        return [records_pb2.Residency.FromString(it).epoch for it in own]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def node(store: Store) -> Node:
    records = Records("n1", store)
    node = Node(Ledger("n1", Limits(16, 1), 1, records), records, ManualClock())
    node.engine_seen("e", [MODEL], Memory())
    return node


def serve(node: Node, name: str) -> None:
    chain = Chain((name.encode().rjust(8),), (40,))
    lease = node.ledger.submit(Demand("m", chain, 40, 5), lambda: None).lease
    assert lease is not None
    end = Finished(generation_pb2.FINISH_REASON_STOP, prompt_tokens=10)
    node.finish(lease, end, node.ledger.epoch, 1.0)


def test_nothing_is_written_before_the_registry_grants_the_id(node: Node, store: Store) -> None:
    serve(node, "a")
    node.evict("", b"")
    node.engine_lost("test")
    node.engine_seen("e", [MODEL], Memory())
    assert (OTHERS in store.known, store.epochs(), store.cleared) == (True, [], 0)


def test_a_grant_replaces_what_others_left_with_what_is_believed_now(
    node: Node, store: Store
) -> None:
    serve(node, "a")
    node.granted(1)
    assert (OTHERS in store.known, store.epochs()) == (False, [1])
    assert b"/cache/n2/m/x" in store.known
    serve(node, "b")
    assert store.epochs() == [1, 1]


def test_the_same_grant_once_more_changes_nothing(node: Node, store: Store) -> None:
    node.granted(1)
    serve(node, "a")
    node.granted(1)
    assert (store.cleared, store.epochs()) == (1, [1])


@pytest.mark.parametrize("how", ["displaced", "stale"])
def test_who_lost_the_id_leaves_the_records_to_their_owner(
    node: Node, store: Store, how: str
) -> None:
    node.granted(1)
    serve(node, "a")
    store.put(OTHERS, b"")
    before = dict(store.known)
    if how == "displaced":
        node.displaced()
    else:
        node.stale(7)
    serve(node, "b")
    node.evict("", b"")
    node.engine_lost("test")
    node.engine_seen("e", [MODEL], Memory())
    assert store.known == before
    serve(node, "c")
    node.granted(node.ledger.epoch)
    assert (OTHERS in store.known, store.epochs()) == (False, [node.ledger.epoch])


def test_an_engine_that_returns_clears_the_records_at_once_where_they_are_granted(
    node: Node, store: Store
) -> None:
    node.granted(1)
    serve(node, "a")
    store.put(OTHERS, b"")
    node.engine_lost("test")
    node.engine_seen("e", [MODEL], Memory())
    assert (OTHERS in store.known, store.epochs()) == (False, [])
