"""The core: what it knows after each thing that it is told, and what it reserves."""

import math
from typing import Any

import pytest

from harness.clock import ManualClock
from harness.routing import MODEL, chain, chat, entry, model, node, request, step
from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import DeadlineUnreachableError, NoNodesError
from kvplane_router.core import UNCONFIRMED_MS, Choice, Core
from kvplane_router.decide import Rules, Stage
from kvplane_router.history import History
from kvplane_router.index import Home
from kvplane_router.overtaken import LATE_MS
from kvplane_router.records import entry_from
from kvplane_router.refusals import PROBE_MS
from kvplane_router.reservations import HOLD_MS
from kvplane_router.sessions import Session
from kvplane_router.wire import decision_to_proto

HOME = Home("a", MODEL, 1, 1)
PROMPT = chain(chat("be kind " * 100, "hello"))


def completion(cached: int | None = None, **told: Any) -> generation_pb2.Completion:
    usage = generation_pb2.Usage(
        prompt_tokens=200,
        completion_tokens=5,
        cached_tokens=cached,
        evidence=told.pop("evidence", generation_pb2.EVIDENCE_MEASURED),
    )
    return generation_pb2.Completion(usage=usage)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def core(clock: ManualClock) -> Core:
    made = Core(clock, Rules(), session_ttl_s=60.0)
    made.nodes_told(step(node("a"), reset=True))
    return made


def ended(core: Core, cached: int | None = None, **asked: Any) -> tuple[Choice, Session | None]:
    choice = core.choose(request(asked.pop("prompt", PROMPT), **asked), {})
    return choice, core.finished(choice, completion(cached))


def test_a_choice_is_reserved_before_the_next_is_made(core: Core) -> None:
    core.nodes_told(step(node("b")))
    choices = [core.choose(request(PROMPT), {}) for _ in range(4)]
    assert sorted(choice.node.node_id for choice in choices) == ["a", "a", "b", "b"]
    for choice in choices:
        core.release(choice)
    assert len(core.reservations) == 0


def test_a_good_end_is_remembered_at_once(core: Core) -> None:
    ended(core)
    assert core.choose(request(PROMPT), {}).decision.stage is Stage.EXACT


def test_the_next_turn_of_a_conversation_finds_its_session(core: Core) -> None:
    _, session = ended(core, session_id="s")
    assert session is not None
    assert (session.node_id, session.epoch, session.last_digest) == ("a", 1, PROMPT.last)
    longer = chain(chat("be kind " * 100, "hello", "hi", "more"))
    asked = request(longer, session_id="s")
    assert core.choose(asked, {}).decision.stage is Stage.SESSION


def test_a_lease_that_was_handed_out_ends_at_the_first_report_that_must_count_it(
    core: Core, clock: ManualClock
) -> None:
    core.hand_out(core.choose(request(PROMPT), {}), "r1")
    clock.advance_ms(LATE_MS - 1)
    core.nodes_told(step(node("a")))
    assert len(core.reservations) == 1  # the report may have been under way
    clock.advance_ms(1)
    core.nodes_told(step(node("a", active=1)))
    assert len(core.reservations) == 0


def test_reservations_that_were_used_do_not_fill_an_idle_node(
    core: Core, clock: ManualClock
) -> None:
    for number in range(20):
        core.hand_out(core.choose(request(PROMPT), {}), f"r{number}")
        clock.advance_ms(HOLD_MS / 3)  # no more than four count at a time, which is what fits
    assert len(core.reservations) <= 4


def test_a_deadline_that_measured_rates_speak_against_is_tried_now_and_then(
    core: Core, clock: ManualClock
) -> None:
    core.nodes_told(step(node("a", model(prefill_tokens_per_s=1.0))))

    def is_let_through() -> bool:
        soon = request(PROMPT, deadline_ms=clock.monotonic_ms() + 5000)
        try:
            core.release(core.choose(soon, {}))
        except DeadlineUnreachableError:
            return False
        return True

    assert [is_let_through(), is_let_through()] == [True, False]
    clock.advance_ms(PROBE_MS - 1)
    assert not is_let_through()
    clock.advance_ms(1)
    assert [is_let_through(), is_let_through()] == [True, False]


def test_a_refusal_is_explained_and_holds_nothing(core: Core) -> None:
    core.nodes_told(step(reset=True))
    with pytest.raises(NoNodesError):
        core.choose(request(PROMPT), {})
    told = core.history.get("r")
    assert told is not None
    assert told.error.startswith("NO_NODES: ")
    assert decision_to_proto(told.decision).refusal_reason.startswith("NO_NODES: ")
    assert len(core.reservations) == 0


def test_a_new_epoch_kills_what_the_node_held(core: Core) -> None:
    ended(core)
    core.nodes_told(step(node("a", epoch=2)))
    assert core.index.entries == 0
    assert core.choose(request(PROMPT), {}).decision.stage is Stage.MISS


def test_records_of_an_earlier_epoch_are_not_taken_in(core: Core) -> None:
    core.nodes_told(step(node("a", epoch=2)))
    core.entry_told(entry("a", PROMPT, epoch=1))
    assert core.index.entries == 0


def test_records_that_come_before_their_node_count_once_it_is_known(core: Core) -> None:
    core.entry_told(entry("b", PROMPT, epoch=4))
    core.nodes_told(step(node("b", epoch=4)))
    choice = core.choose(request(PROMPT), {})
    assert (choice.node.node_id, choice.decision.stage) == ("b", Stage.EXACT)


def test_records_that_came_before_a_later_epoch_of_their_node_are_dropped(core: Core) -> None:
    core.entry_told(entry("b", PROMPT, epoch=4))
    core.nodes_told(step(node("b", epoch=5)))
    assert core.index.entries == 0


def test_a_removed_node_leaves_nothing_behind(core: Core) -> None:
    ended(core)
    core.nodes_told(step(removed=("a",)))
    assert (core.index.entries, core.index.digests) == (0, 0)


def test_a_node_that_a_reset_leaves_out_leaves_nothing_behind(core: Core) -> None:
    ended(core)
    core.entry_told(entry("unheard", PROMPT))
    core.nodes_told(step(node("b"), reset=True))
    assert core.index.keys() == (entry("unheard", PROMPT).key,)


def test_a_registry_that_tells_the_same_nodes_again_does_not_cost_the_index(core: Core) -> None:
    ended(core)
    core.nodes_told(step(node("a"), reset=True))
    assert core.choose(request(PROMPT), {}).decision.stage is Stage.EXACT


def test_a_removed_record_is_forgotten(core: Core) -> None:
    ended(core)
    core.entry_gone(entry("a", PROMPT).key)
    assert core.index.entries == 0


def test_an_own_entry_that_no_agent_confirms_goes_in_time(core: Core, clock: ManualClock) -> None:
    ended(core)
    clock.advance_ms(UNCONFIRMED_MS - 1)
    core.records_heard()
    assert core.index.entries == 1
    clock.advance_ms(1)
    core.records_heard()
    assert core.index.entries == 0


def test_without_the_records_an_own_entry_stays_and_then_has_its_time_again(
    core: Core, clock: ManualClock
) -> None:
    ended(core)
    clock.advance_ms(2 * UNCONFIRMED_MS)
    core.sweep()
    assert core.keys_confirmed() == []  # so that a new snapshot does not cost it either
    core.records_synced()
    core.records_heard()
    assert core.choose(request(PROMPT), {}).decision.stage is Stage.EXACT
    clock.advance_ms(UNCONFIRMED_MS)
    core.records_heard()
    assert core.index.entries == 0


def test_without_the_records_the_oldest_own_entries_make_room(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplane_router.core.MOST_UNCONFIRMED", 2)
    prompts = [chain(chat(text)) for text in ("one", "two", "three")]
    for prompt in prompts:
        ended(core, prompt=prompt)
    assert core.index.keys() == tuple(entry("a", prompt).key for prompt in prompts[1:])


def test_a_record_that_comes_before_the_end_confirms_it(core: Core, clock: ManualClock) -> None:
    choice = core.choose(request(PROMPT), {})
    core.entry_told(entry("a", PROMPT, tokens=99))
    core.finished(choice, completion())
    clock.advance_ms(UNCONFIRMED_MS)
    core.records_heard()
    kept = core.index.get(entry("a", PROMPT).key)
    assert kept is not None
    assert (kept.tokens, kept.last_use_ms > 0) == (99, True)


@pytest.mark.parametrize(
    ("counted", "tokens"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 2}, 9),
        ({"prompt_tokens": 7}, 0),
        ({"completion_tokens": 2}, 0),
    ],
    ids=["both", "only the prompt", "only the answer"],
)
def test_tokens_are_counted_only_where_both_counts_are_known(
    core: Core, counted: dict[str, Any], tokens: int
) -> None:
    told = generation_pb2.Completion(usage=generation_pb2.Usage(**counted))
    session = core.finished(core.choose(request(PROMPT, session_id="s"), {}), told)
    coldest = core.index.coldest(HOME)
    assert session is not None
    assert coldest is not None
    assert (session.tokens, coldest.tokens) == (tokens, tokens)


def test_an_own_entry_that_its_agent_confirms_stays(core: Core, clock: ManualClock) -> None:
    ended(core)
    core.entry_told(entry("a", PROMPT))
    clock.advance_ms(UNCONFIRMED_MS)
    core.records_heard()
    assert core.index.entries == 1


def test_collapsed_predictions_empty_the_node_for_that_model(core: Core) -> None:
    core.nodes_told(step(node("a", model(), model("other"))))
    core.entry_told(entry("a", chain(chat("another")), model="other"))
    core.entry_told(entry("a", chain(chat("third"))))
    ended(core)
    for _ in range(3):
        ended(core, cached=0)
    # What has just been evaluated is there, whatever else is not.
    assert core.index.residents(HOME) == 1
    assert core.index.residents(Home("a", "other", 1, 1)) == 1


@pytest.mark.parametrize(
    "told",
    [
        completion(None),
        completion(0, evidence=generation_pb2.EVIDENCE_INFERRED),
    ],
    ids=["not reported", "only inferred"],
)
def test_what_is_not_measured_does_not_count_as_a_miss(
    core: Core, told: generation_pb2.Completion
) -> None:
    core.entry_told(entry("a", chain(chat("third"))))
    for _ in range(5):
        core.finished(core.choose(request(PROMPT), {}), told)
    assert core.index.residents(HOME) == 2


def test_an_end_after_a_restart_leaves_no_entry_of_the_old_epoch(core: Core) -> None:
    choice = core.choose(request(PROMPT), {})
    core.nodes_told(step(node("a", epoch=2)))
    core.finished(choice, completion())
    assert core.index.entries == 0
    assert len(core.reservations) == 0


def test_a_record_without_a_chain_matches_nothing_and_a_malformed_one_is_an_error() -> None:
    assert entry_from(b"k", b"") is None
    with pytest.raises(Exception, match="rror"):
        entry_from(b"k", b"\xff\xff")


def test_the_last_decisions_are_remembered_and_older_ones_forgotten(core: Core) -> None:
    history = History(most=2)
    assert history.get("") is None
    for name in ("r1", "r2", "r1", "r3"):
        history.decided(core.choose(request(PROMPT, request_id=name), {}).decision)
    latest, kept = history.get(""), history.get("r1")
    assert latest is not None
    assert kept is not None
    assert (latest.decision.request_id, kept.decision.request_id) == ("r3", "r1")
    assert history.get("r2") is None


@pytest.mark.parametrize(
    "figure", [math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e-300, 1e300], ids=str
)
def test_a_figure_that_nobody_can_have_measured_is_unknown_and_harms_no_request(
    core: Core, figure: float
) -> None:
    names = ("prefill_tokens_per_s", "service_ms", "load_ms", "bytes_per_token")
    told: dict[str, Any] = dict.fromkeys((*names, "kv_bytes_per_token"), figure)
    core.nodes_told(step(node("a", model(**told), blocks=10, active=2), reset=True))
    found = core.fleet.alive()[0].models[MODEL]
    assert {getattr(found, name) for name in told} == {None}
    choice = core.choose(request(PROMPT, deadline_ms=2e6), {})
    assert decision_to_proto(choice.decision).SerializeToString()
