"""What the caller is told when no node can take a request."""

from typing import Any

import pytest

from harness.routing import BLOCK_BYTES, chain, fleet, model, node, request
from kvplane.common.v1 import node_pb2
from kvplane_common.errors import (
    ContextExceededError,
    DeadlineUnreachableError,
    KvBlocksBusyError,
    KvBudgetExceededError,
    KvplaneError,
    ModelNotFoundError,
    NodeDrainingError,
    NodesDrainingError,
    NoNodesError,
    QueueFullError,
    UnavailableError,
)
from kvplane_router.decide import Decision, Rules, Stage, View, decide
from kvplane_router.fleet import Fleet
from kvplane_router.index import PrefixIndex
from kvplane_router.refusals import PROBE_MS
from kvplane_router.reservations import Reservations

# 1,000 tokens of 4 bytes, and 125 at the very least: the seed and the marker take 15.
PROMPT = chain("x" * 3985)
HEAVY: dict[str, Any] = {"kv_bytes_per_token": BLOCK_BYTES / 100}
SHORT = model(context_tokens=120)


def decided(
    *nodes: node_pb2.Node, tried: dict[str, KvplaneError] | None = None, **asked: Any
) -> Decision:
    view = View(fleet(*nodes), PrefixIndex(), Reservations())
    return decide(view, request(PROMPT, **asked), None, tried or {}, Rules(), 0, 1000.0)


def refusal(*nodes: node_pb2.Node, **asked: Any) -> KvplaneError:
    decision = decided(*nodes, **asked)
    assert decision.stage is Stage.REJECT
    assert decision.chosen is None
    assert decision.refusal is not None
    return decision.refusal


@pytest.mark.parametrize(
    ("nodes", "kind", "measured", "limit"),
    [
        ([], NoNodesError, "0", "1"),
        ([node("a", state=node_pb2.Node.STATE_LOST)], NoNodesError, "0", "1"),
        ([node("a", model("p")), node("b", model("q"))], ModelNotFoundError, "llama", "p, q"),
        ([node("a", draining=True)], NodesDrainingError, "1", "0"),
        ([node("a", draining=True), node("b", model("q"))], NodesDrainingError, "1", "0"),
        ([node("a", SHORT)], ContextExceededError, "125", "120"),
        (
            [node("a", model(context_tokens=100)), node("b", SHORT)],
            ContextExceededError,
            "125",
            "120",
        ),
        ([node("a", model(**HEAVY), blocks=1)], KvBudgetExceededError, "2", "1"),
        ([node("a", model(**HEAVY), blocks=20, active_blocks=15)], KvBlocksBusyError, "11", "5"),
        ([node("a", active=2, queued=2)], QueueFullError, "4", "4"),
        (
            [node("a", SHORT), node("b", active=2, queued=2)],
            QueueFullError,
            "4",
            "4",
        ),
    ],
    ids=[
        "there is no node",
        "the only node is lost",
        "no node has the model",
        "the only node drains",
        "the only node with the model drains",
        "the prompt is surely longer than the context",
        "it is longer than the largest context",
        "it would not fit an empty pool",
        "running requests hold the blocks",
        "every place is taken",
        "one could never take it and the other only later",
    ],
)
def test_a_refusal_says_why_with_both_numbers(
    nodes: list[node_pb2.Node], kind: type[KvplaneError], measured: str, limit: str
) -> None:
    error = refusal(*nodes)
    assert type(error) is kind
    assert (error.facts["measured"], error.facts["limit"]) == (measured, limit)


@pytest.mark.parametrize(
    "one",
    [node("a", model(context_tokens=125)), node("a", model(**HEAVY), blocks=2)],
    ids=["the context", "the blocks"],
)
def test_what_only_the_estimate_exceeds_is_left_to_the_node(one: node_pb2.Node) -> None:
    assert decided(one).chosen is not None


def test_what_was_learned_of_other_texts_refuses_nothing_for_ever() -> None:
    dense = model(context_tokens=125, bytes_per_token=1.0, **HEAVY)
    decision = decided(node("a", dense, blocks=2))
    assert decision.prompt_tokens == 4000
    assert decision.chosen is not None


def test_the_tokens_that_the_caller_asks_for_count_for_the_budget() -> None:
    error = refusal(node("a", model(**HEAVY), blocks=10), answer_tokens=1000)
    assert type(error) is KvBudgetExceededError
    assert (error.facts["measured"], error.facts["limit"]) == ("12", "10")


def test_a_router_that_the_registry_has_told_nothing_says_so() -> None:
    view = View(Fleet(), PrefixIndex(), Reservations())
    told = decide(view, request(PROMPT), None, {}, Rules(), 0, 1000.0).refusal
    assert type(told) is NoNodesError
    assert "the registry has not answered" in str(told)
    assert told.retry_after_ms is not None


def test_blocks_that_come_free_with_the_awaited_slot_are_no_reason_to_refuse() -> None:
    busy = node("a", model(**HEAVY), blocks=20, active_blocks=20, active=2)
    assert decided(busy).stage is Stage.MISS


def test_waiting_is_advised_by_the_measured_service_time() -> None:
    assert refusal(node("a", model(service_ms=3000.0), active=2, queued=2)).retry_after_ms == 1500


def test_of_full_queues_the_shortest_wait_is_told() -> None:
    slow = node("a", model(service_ms=9000.0), active=2, queued=2)
    fast = node("b", model(service_ms=400.0), active=2, queued=2)
    assert refusal(slow, fast).retry_after_ms == 200


def test_a_deadline_that_no_node_can_meet_is_refused_early() -> None:
    error = refusal(node("a"), deadline_ms=1500.0)
    assert type(error) is DeadlineUnreachableError
    assert (error.facts["measured"], error.facts["limit"]) == ("1000", "500")
    assert error.retry_after_ms == PROBE_MS


def test_a_deadline_is_not_held_against_a_node_that_has_not_measured_itself() -> None:
    unknown = model(prefill_tokens_per_s=None)
    decision = decided(node("a"), node("b", unknown), deadline_ms=1500.0)
    assert decision.chosen is not None
    assert decision.chosen.node.node_id == "b"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([QueueFullError("full", retry_after_ms=5), UnavailableError("gone")], QueueFullError),
        ([ContextExceededError("long"), UnavailableError("gone")], UnavailableError),
        ([ContextExceededError("long"), KvBudgetExceededError("big")], KvBudgetExceededError),
        ([NodeDrainingError("drains"), NodeDrainingError("drains")], NodesDrainingError),
        ([NodeDrainingError("drains"), UnavailableError("gone")], UnavailableError),
    ],
    ids=[
        "full and gone",
        "too long and gone",
        "too long and too big",
        "both drain",
        "one drains and one is gone",
    ],
)
def test_of_what_the_nodes_said_the_most_hopeful_is_told(
    said: list[KvplaneError], told: type[KvplaneError]
) -> None:
    tried = dict(zip("ab", said, strict=True))
    assert type(refusal(node("a"), node("b"), tried=tried)) is told


def test_what_a_node_said_goes_before_what_was_expected_of_another() -> None:
    own = QueueFullError("full", retry_after_ms=9000)
    assert refusal(node("a"), node("b", active=2, queued=2), tried={"a": own}) is own


def test_what_a_node_said_is_told_though_the_node_is_gone_since() -> None:
    own = UnavailableError("gone")
    assert refusal(tried={"a": own}) is own


def test_a_context_that_was_too_small_rules_out_all_that_are_no_larger() -> None:
    nodes = [
        node(name, model(context_tokens=tokens))
        for name, tokens in [("a", 2048), ("b", 2048), ("c", 1024), ("d", 4096)]
    ]
    own = ContextExceededError("long", measured=3000, limit=2048)
    decision = decided(*nodes, tried={"a": own})
    assert decision.chosen is not None
    assert decision.chosen.node.node_id == "d"
    assert refusal(*nodes[:3], tried={"a": own}) is own
