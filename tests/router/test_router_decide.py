"""Which node is chosen, on which rung, and what reaches it."""

from collections import Counter
from typing import Any

import pytest

from harness.routing import BLOCK_BYTES, MODEL, chain, chat, entry, fleet, model, node, request
from kvplane.common.v1 import node_pb2
from kvplane_common.chains import Chain
from kvplane_common.errors import KvplaneError, QueueFullError
from kvplane_router.decide import Decision, Request, Rules, Stage, View, decide
from kvplane_router.index import Entry, PrefixIndex
from kvplane_router.reservations import Reservations
from kvplane_router.sessions import Session

SYSTEM = "be kind " * 100
TURN_1 = chain(chat(SYSTEM, "hello " * 100))
TURN_2 = chain(chat(SYSTEM, "hello " * 100, "hi", "how are you?"))
OTHER = chain(chat(SYSTEM, "good evening " * 100))
UNRELATED = chain(chat("x" * 2000))


SHORT_1 = chain(chat("be kind", "hello"))
SHORT_2 = chain(chat("be kind", "hello", "hi", "how are you?"))
SHORT_3 = chain(chat("be kind", "good evening"))


def view(*nodes: node_pb2.Node, cached: tuple[Entry, ...] = ()) -> View:
    index = PrefixIndex()
    for one in cached:
        index.put(one)
    return View(fleet(*nodes), index, Reservations())


def session(node_id: str, last: Chain = TURN_1, epoch: int = 1, name: str = MODEL) -> Session:
    return Session("default", "s", name, node_id, epoch, last.last, last.length_bytes, 0, 10**15)


def decided(
    known: View,
    asked: Request,
    on: Session | None = None,
    *,
    tried: dict[str, KvplaneError] | None = None,
    rotation: int = 0,
    now_ms: float = 0.0,
    **rules: Any,
) -> Decision:
    return decide(known, asked, on, tried or {}, Rules(**rules), rotation, now_ms)


def chosen(decision: Decision) -> str:
    assert decision.chosen is not None, decision.refusal
    return decision.chosen.node.node_id


@pytest.mark.parametrize(
    ("cached", "on", "asked", "stage"),
    [
        ((entry("a", TURN_1),), session("a"), TURN_2, Stage.SESSION),
        ((), session("a"), TURN_2, Stage.MISS),
        ((entry("a", UNRELATED),), session("a"), TURN_2, Stage.MISS),
        ((entry("a", SHORT_1),), session("a", SHORT_1), SHORT_2, Stage.SESSION),
        ((entry("a", SHORT_1),), None, SHORT_2, Stage.PREFIX),
        ((entry("a", SHORT_1),), None, SHORT_3, Stage.MISS),
        ((entry("a", TURN_1),), session("a", epoch=7), TURN_2, Stage.PREFIX),
        ((entry("a", TURN_1),), session("a", UNRELATED), TURN_2, Stage.PREFIX),
        ((entry("a", TURN_1),), session("a", name="other"), TURN_2, Stage.PREFIX),
        ((entry("a", TURN_1),), None, TURN_1, Stage.EXACT),
        ((entry("a", TURN_2),), None, TURN_1, Stage.EXACT),
        ((entry("a", TURN_1),), None, OTHER, Stage.PREFIX),
        ((entry("a", TURN_1),), None, UNRELATED, Stage.MISS),
        ((entry("a", TURN_1, epoch=2),), None, TURN_1, Stage.MISS),
        ((entry("a", TURN_1, generation=2),), None, TURN_1, Stage.MISS),
    ],
    ids=[
        "the conversation goes on",
        "nothing is cached any more of the conversation",
        "nothing but others' prompts is cached where the conversation was",
        "a short conversation goes on",
        "a short cached prompt goes on",
        "a short beginning is shared with a cached prompt",
        "the node restarted after the last turn",
        "the conversation was rewritten from its beginning",
        "the conversation went to another model",
        "the same prompt again",
        "a beginning of a cached prompt",
        "a shared system message",
        "nothing in common",
        "cached in another epoch",
        "cached in another load of the model",
    ],
)
def test_the_rung_that_won(
    cached: tuple[Entry, ...], on: Session | None, asked: Chain, stage: Stage
) -> None:
    decision = decided(view(node("a"), cached=cached), request(asked), on)
    assert (chosen(decision), decision.stage) == ("a", stage)


def test_where_idle_prompts_must_go_the_rung_is_evict() -> None:
    heavy = model(kv_bytes_per_token=BLOCK_BYTES / 10)
    full = node("a", heavy, blocks=100, resident_blocks=95)
    decision = decided(view(full), request(UNRELATED))
    assert decision.stage is Stage.EVICT
    assert decision.chosen is not None
    assert decision.chosen.evicted_blocks > 0


def test_a_match_under_the_minimum_earns_no_credit() -> None:
    known = view(node("a"), cached=(entry("a", TURN_1),))
    tokens = TURN_1.shared_bytes(OTHER) // 4
    above = decided(known, request(OTHER), min_match_tokens=tokens)
    below = decided(known, request(OTHER), min_match_tokens=tokens + 1)
    assert (above.stage, below.stage) == (Stage.PREFIX, Stage.MISS)
    assert above.chosen
    assert below.chosen
    assert above.chosen.cached.tokens == tokens
    assert below.chosen.cached.tokens == 0


def test_a_short_prompt_that_is_cached_as_a_whole_counts() -> None:
    short = chain(chat("hello"))
    decision = decided(view(node("a"), cached=(entry("a", short),)), request(short))
    assert decision.stage is Stage.EXACT
    assert decision.chosen is not None
    assert decision.chosen.cached.tokens == decision.prompt_tokens - 1


@pytest.mark.parametrize("policy", ["ttft", "ladder"])
@pytest.mark.parametrize(
    ("cached", "on"),
    [((entry("b", TURN_1),), session("b")), ((entry("b", TURN_1),), None)],
    ids=["session", "prefix"],
)
def test_what_is_cached_draws_a_request(
    policy: str, cached: tuple[Entry, ...], on: Session | None
) -> None:
    known = view(node("a"), node("b"), node("c"), cached=cached)
    asked = request(TURN_2)
    choices = {chosen(decided(known, asked, on, policy=policy, rotation=n)) for n in range(3)}
    assert choices == {"b"}


def test_a_saturated_home_spills_to_an_idle_node() -> None:
    cached = (entry("a", TURN_1),)
    known = view(node("a", active=2), node("b"), cached=cached)
    decision = decided(known, request(TURN_2), session("a"))
    assert (chosen(decision), decision.stage) == ("b", Stage.MISS)


def test_the_ladder_keeps_to_a_saturated_home() -> None:
    cached = (entry("a", TURN_1),)
    known = view(node("a", active=2), node("b"), cached=cached)
    assert chosen(decided(known, request(TURN_2), session("a"), policy="ladder")) == "a"


def test_the_ladder_prefers_the_prompt_to_where_its_conversation_was() -> None:
    known = view(node("a"), node("b"), cached=(entry("a", UNRELATED), entry("b", TURN_1)))
    decision = decided(known, request(TURN_1), session("a"), policy="ladder")
    assert (chosen(decision), decision.stage) == ("b", Stage.EXACT)


def test_of_nodes_within_the_load_the_longest_prefix_wins() -> None:
    cached = (entry("a", TURN_2), entry("b", TURN_1), entry("c", OTHER))
    longer = chain(chat(SYSTEM, "hello " * 100, "hi", "how are you?", "fine " * 50, "good"))
    known = view(node("a", active=2), node("b"), node("c"), cached=cached)
    assert chosen(decided(known, request(longer))) == "b"


def test_a_miss_goes_to_the_least_loaded_node() -> None:
    known = view(node("a", active=1), node("b", pending=400), node("c"))
    assert {chosen(decided(known, request(UNRELATED), rotation=n)) for n in range(3)} == {"c"}


def test_among_equally_cheap_nodes_the_one_with_fewest_in_flight_wins() -> None:
    wide = model(slots=8)
    known = view(node("a", wide, active=7), node("b", wide, active=1), node("c", wide, active=2))
    assert chosen(decided(known, request(UNRELATED))) == "b"


def test_a_fast_node_is_preferred_over_a_slow_one() -> None:
    slow, fast = model(prefill_tokens_per_s=300.0), model(prefill_tokens_per_s=900.0)
    assert chosen(decided(view(node("a", slow), node("b", fast)), request(UNRELATED))) == "b"


def test_a_node_of_unknown_speed_is_weighed_as_the_median() -> None:
    unknown = model(prefill_tokens_per_s=None)
    known = view(node("a", model(prefill_tokens_per_s=100.0)), node("b", unknown), node("c"))
    decision = decided(known, request(UNRELATED))
    costs = {one.node.node_id: one.prefill_ms for one in decision.candidates}
    assert costs["c"] < costs["b"] < costs["a"]
    assert chosen(decision) == "c"


def test_a_loaded_model_is_preferred_over_one_that_must_be_loaded() -> None:
    known = view(node("a", model(loaded=False, load_ms=3000.0)), node("b", active=1))
    assert chosen(decided(known, request(UNRELATED))) == "b"


def test_an_unloaded_model_has_nothing_cached() -> None:
    known = view(node("a", model(loaded=False)), cached=(entry("a", TURN_1),))
    assert decided(known, request(TURN_1)).stage is Stage.MISS


def test_equals_take_turns() -> None:
    known = view(node("a"), node("b"), node("c"))
    choices = [chosen(decided(known, request(UNRELATED), rotation=n)) for n in range(6)]
    assert choices == ["a", "b", "c", "a", "b", "c"]


def test_among_equals_the_best_fit_wins() -> None:
    light = model(kv_bytes_per_token=BLOCK_BYTES / 100)
    known = view(
        node("a", light, blocks=100),
        node("b", light, blocks=100, active_blocks=60),
        node("c", light, blocks=100, active_blocks=30),
    )
    assert {chosen(decided(known, request(UNRELATED), rotation=n)) for n in range(3)} == {"b"}


def test_a_burst_spreads_because_each_choice_reserves() -> None:
    known = view(node("a"), node("b"), node("c"), node("d"))
    taken: Counter[str] = Counter()
    for rotation in range(8):
        decision = decided(known, request(UNRELATED), rotation=rotation)
        assert decision.chosen is not None
        uncached = decision.chosen.uncached_tokens
        known.reservations.take(chosen(decision), MODEL, uncached, 0)
        taken[chosen(decision)] += 1
    assert set(taken.values()) == {2}


def test_one_shared_prefix_does_not_send_a_burst_to_one_node() -> None:
    known = view(*(node(name) for name in "abcd"), cached=(entry("a", TURN_1),))
    taken: Counter[str] = Counter()
    for number in range(12):
        asked = request(chain(chat(SYSTEM, f"question {number} " * 200)))
        decision = decided(known, asked, rotation=number)
        assert decision.chosen is not None
        uncached = decision.chosen.uncached_tokens
        known.reservations.take(chosen(decision), MODEL, uncached, 0)
        taken[chosen(decision)] += 1
    assert max(taken.values()) <= 4


@pytest.mark.parametrize(
    "other",
    [
        node("a", draining=True),
        node("a", state=node_pb2.Node.STATE_LOST),
        node("a", model("another")),
        node("a", active=2, queued=2),
    ],
    ids=["draining", "lost", "without the model", "with a full queue"],
)
def test_a_node_that_cannot_take_it_is_left_out_though_it_has_the_cache(
    other: node_pb2.Node,
) -> None:
    known = view(other, node("b"), cached=(entry("a", TURN_1),))
    assert chosen(decided(known, request(TURN_2), session("a"))) == "b"


def test_a_tried_node_is_not_chosen_again_and_counts_as_an_attempt() -> None:
    known = view(node("a"), node("b"))
    tried: dict[str, KvplaneError] = {"a": QueueFullError("full")}
    decision = decided(known, request(UNRELATED), tried=tried)
    assert (chosen(decision), decision.attempts) == ("b", 2)


def test_a_suspect_is_chosen_only_when_there_is_nobody_else_or_it_is_forgiven() -> None:
    known = view(node("a"), node("b"), cached=(entry("a", TURN_1),))
    known.fleet.suspect("a", now_ms=0.0)
    assert chosen(decided(known, request(TURN_1), now_ms=1999.0)) == "b"
    assert chosen(decided(known, request(TURN_1), now_ms=2000.0)) == "a"
    known.fleet.suspect("b", now_ms=0.0)
    assert chosen(decided(known, request(TURN_1), now_ms=1.0)) == "a"


def test_candidates_come_best_first_and_the_excluded_last_with_their_reason() -> None:
    known = view(node("a", draining=True), node("b", pending=9000), node("c"))
    decision = decided(known, request(UNRELATED))
    assert [one.node.node_id for one in decision.candidates] == ["c", "b", "a"]
    excluded = decision.candidates[-1].excluded
    assert excluded is not None
    assert excluded.reason == "NODE_DRAINING"
