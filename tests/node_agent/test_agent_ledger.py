"""The node's books: admission, settlement, generations and epochs, without an engine."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvplane.common.v1 import generation_pb2
from kvplane_common.chains import Chain
from kvplane_common.errors import KvplaneError
from kvplane_node_agent.admission import Lease, Ticket
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.engines.base import EngineModel, Finished
from kvplane_node_agent.ledger import Ledger, Limits
from kvplane_node_agent.residency import Residency
from kvplane_node_agent.served import ServedModel

STOP = generation_pb2.FINISH_REASON_STOP
MODEL = EngineModel("m", loaded=True, slots=2, context_tokens=100, kv_bytes_per_token=1.0)
NOW_MS = 5_000


class NoJournal:
    def put(self, residency: Residency) -> None: ...

    def delete(self, residency: Residency) -> None: ...


def chain(*names: str) -> Chain:
    digests = tuple("".join(names[: end + 1]).encode().rjust(8, b".") for end in range(len(names)))
    return Chain(digests, tuple(40 * (end + 1) for end in range(len(names))))


def demand(*names: str, output_tokens: int = 5, model: str = "m") -> Demand:
    known = chain(*names) if names else None
    return Demand(model, known, 40 * len(names) or None, output_tokens)


def ledger_of(
    models: Sequence[EngineModel] = (MODEL,), budget: int | None = 100, queue_limit: int = 1
) -> Ledger:
    limits = Limits(block_bytes=10, queue_limit=queue_limit, kv_budget_bytes=budget)
    ledger = Ledger("n1", limits, 1, NoJournal())
    ledger.engine_seen(models, None, 1)
    return ledger


def submit(ledger: Ledger, wanted: Demand) -> Ticket:
    return ledger.submit(wanted, lambda: None)


def lease_of(ledger: Ledger, wanted: Demand) -> Lease:
    ticket = submit(ledger, wanted)
    assert ticket.lease is not None
    return ticket.lease


def finish(ledger: Ledger, lease: Lease, epoch: int = 1, **fields: Any) -> None:
    values: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 5, **fields}
    ledger.finish(lease, Finished(STOP, **values), epoch, NOW_MS, 100.0)


def chains(ledger: Ledger) -> list[Chain]:
    return [one.chain for one in ledger.residencies]


def test_a_request_holds_the_blocks_of_its_prompt_and_its_answer() -> None:
    ledger = ledger_of()
    lease = lease_of(ledger, demand("a", "b", output_tokens=15))
    assert lease.blocks == ledger.pool.active == 4
    finish(ledger, lease, prompt_tokens=11, completion_tokens=2)
    assert (ledger.pool.active, ledger.pool.resident) == (0, 2)


def test_an_answer_is_not_expected_to_leave_the_context() -> None:
    lease = lease_of(ledger_of(), demand("a", output_tokens=100_000))
    assert lease.blocks == 10


def test_where_the_geometry_is_unknown_slots_alone_decide() -> None:
    ledger = ledger_of([replace(MODEL, kv_bytes_per_token=None)])
    leases = [lease_of(ledger, demand(name, output_tokens=10_000)) for name in "ab"]
    assert [lease.blocks for lease in leases] == [0, 0]
    assert submit(ledger, demand("c")).lease is None


def test_a_lease_is_given_back_exactly_once() -> None:
    ledger = ledger_of()
    lease = lease_of(ledger, demand("a"))
    ledger.abandon(lease)
    with pytest.raises(RuntimeError, match="twice"):
        ledger.abandon(lease)
    with pytest.raises(RuntimeError, match="twice"):
        finish(ledger, lease)
    assert ledger.pool.active == 0


def test_those_who_wait_are_let_in_first_come_first_served() -> None:
    ledger = ledger_of(queue_limit=2)
    running = [lease_of(ledger, demand(name)) for name in "ab"]
    told: list[str] = []
    tickets = [ledger.submit(demand(name), partial(told.append, name)) for name in "cd"]
    ledger.abandon(running[0])
    assert (told, tickets[0].lease is not None, tickets[1].lease) == (["c"], True, None)
    ledger.withdraw(tickets[0])
    assert told == ["c", "d"]


def test_one_who_comes_later_does_not_pass_those_who_wait() -> None:
    ledger = ledger_of(queue_limit=2)
    for name in "ab":
        lease_of(ledger, demand(name))
    submit(ledger, demand("c"))
    ledger.engine_seen([replace(MODEL, slots=2)], None, 1)
    assert submit(ledger, demand("d")).lease is None


def test_a_request_that_waited_is_matched_to_what_was_left_meanwhile() -> None:
    ledger = ledger_of([replace(MODEL, slots=1)])
    first = lease_of(ledger, demand("a"))
    second = submit(ledger, demand("a", "b"))
    finish(ledger, first)
    assert second.lease is not None
    assert second.lease.predicted_cached_tokens == 10


def busy(ledger: Ledger) -> None:
    for name in "xyz":
        submit(ledger, demand(name))


def full(ledger: Ledger) -> None:
    lease_of(ledger, demand("x", output_tokens=85))


@pytest.mark.parametrize(
    ("before", "wanted", "reason", "facts"),
    [
        (lambda ledger: None, demand("a", model="o"), "MODEL_NOT_FOUND", {"models": "m"}),
        (
            lambda ledger: None,
            demand("a", output_tokens=55),
            "KV_BUDGET_EXCEEDED",
            {"required_blocks": "6", "total_blocks": "5", "measured": "6", "limit": "5"},
        ),
        (full, demand("a"), "KV_BLOCKS_BUSY", {"required_blocks": "2", "total_blocks": "10"}),
        (busy, demand("a"), "QUEUE_FULL", {"measured": "1", "limit": "1"}),
        (
            lambda ledger: None,
            Demand("m", None, 32 * 101, 5),
            "CONTEXT_EXCEEDED",
            {"prompt_tokens": "101", "context_tokens": "100", "measured": "101", "limit": "100"},
        ),
        (lambda ledger: ledger.set_draining(True), demand("a"), "NODE_DRAINING", {}),
        (lambda ledger: ledger.stop(), demand("a"), "NODE_DRAINING", {}),
        (lambda ledger: ledger.engine_lost(), demand("a"), "ENGINE_UNAVAILABLE", {}),
    ],
    ids=[
        "an unknown model", "more than there is", "blocks are busy", "the queue is full",
        "over the context in any case", "drained", "stopping", "no engine",
    ],
)  # fmt: skip
def test_a_refusal_tells_its_reason_and_its_numbers(
    before: Any, wanted: Demand, reason: str, facts: dict[str, str]
) -> None:
    ledger = ledger_of(budget=50 if reason == "KV_BUDGET_EXCEEDED" else 100)
    before(ledger)
    with pytest.raises(KvplaneError) as caught:
        submit(ledger, wanted)
    assert caught.value.reason == reason
    assert facts.items() <= caught.value.facts.items()


@pytest.mark.parametrize("bytes_per_token", [None, 0.5], ids=["nothing learned", "dense text"])
def test_a_doubtful_length_is_left_to_the_engine(bytes_per_token: float | None) -> None:
    ledger = ledger_of(budget=50)
    if bytes_per_token:
        ledger.models.known()[0].rates.learn_bytes(int(1000 * bytes_per_token), 1000)
    assert lease_of(ledger, Demand("m", None, 32 * 44, 5)).blocks == 5


def test_a_digest_at_a_false_end_shares_no_more_than_there_is() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    false = Chain((chain("a").last,), (2**32 - 1,))
    lease = lease_of(ledger, Demand("m", false, 40, 5))
    assert lease.predicted_cached_tokens == 10


class Unforeseen(Demand):
    """Goes wrong once it has been in the queue."""

    def kv_bytes(self, model: ServedModel) -> float | None:
        raise ZeroDivisionError


def test_what_goes_wrong_with_one_who_waits_harms_nobody_else() -> None:
    ledger = ledger_of(queue_limit=3)
    running = [lease_of(ledger, demand(name)) for name in "ab"]
    told: list[str] = []
    bad = ledger.submit(Unforeseen("m", None, 40, 5), partial(told.append, "bad"))
    good = ledger.submit(demand("c"), partial(told.append, "good"))
    ledger.abandon(running[0])
    assert told == ["bad", "good"]
    assert isinstance(bad.refusal, ZeroDivisionError)
    assert good.lease is not None


def test_the_retry_comes_when_a_slot_should_be_free() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    busy(ledger)
    with pytest.raises(KvplaneError) as caught:
        submit(ledger, demand("b"))
    assert caught.value.retry_after_ms == 50


def test_the_oldest_idle_prompt_makes_room_and_a_claimed_one_never_does() -> None:
    ledger = ledger_of(budget=50)
    for name in "ab":
        finish(ledger, lease_of(ledger, demand(name)))
    again = lease_of(ledger, demand("a", "c"))
    assert again.match is not None
    assert again.match.whole
    another = lease_of(ledger, demand("d"))
    assert another.evicted_blocks == 2
    assert chains(ledger) == [chain("a")]
    with pytest.raises(KvplaneError, match="KV blocks"):
        submit(ledger_of(budget=10), demand("d", output_tokens=15))


def test_nothing_is_evicted_for_a_request_that_cannot_be_admitted_anyway() -> None:
    ledger = ledger_of(budget=60)
    finish(ledger, lease_of(ledger, demand("a")))
    lease_of(ledger, demand("b", output_tokens=25))
    with pytest.raises(KvplaneError) as caught:
        submit(ledger, demand("c", output_tokens=25))
    assert caught.value.reason == "KV_BLOCKS_BUSY"
    assert chains(ledger) == [chain("a")]


def test_the_next_turn_takes_the_place_of_the_last() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    finish(ledger, lease_of(ledger, demand("a", "b")), prompt_tokens=20, cached_tokens=10)
    (left,) = ledger.residencies
    assert left.chain == chain("a", "b")
    assert (left.tokens, left.hits, left.evidence) == (25, 1, generation_pb2.EVIDENCE_MEASURED)


def test_another_conversation_with_the_same_beginning_is_kept_beside() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("s", "a")))
    finish(ledger, lease_of(ledger, demand("s", "b")), cached_tokens=5)
    assert set(chains(ledger)) == {chain("s", "a"), chain("s", "b")}


def test_an_authoritative_zero_deletes_what_was_believed() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("s", "a")))
    finish(ledger, lease_of(ledger, demand("s", "b")), cached_tokens=0)
    assert chains(ledger) == [chain("s", "b")]


def test_an_absent_count_leaves_the_belief_as_it_was() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("s", "a")))
    (before,) = ledger.residencies
    finish(ledger, lease_of(ledger, demand("s", "b")))
    assert before in list(ledger.residencies)


def test_a_request_that_did_not_end_well_leaves_the_belief_as_it_was() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    before = list(ledger.residencies)
    ledger.abandon(lease_of(ledger, demand("a", "b")))
    assert list(ledger.residencies) == before
    assert (ledger.pool.active, ledger.pool.resident) == (0, 2)


def test_a_long_load_begins_a_new_generation_before_the_prompt_is_remembered() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    finish(ledger, lease_of(ledger, demand("b")), load_ms=2500.0, prefill_ms=10.0)
    (left,) = ledger.residencies
    assert (left.chain, left.generation) == (chain("b"), 2)


def test_two_requests_that_waited_for_the_same_load_begin_one_generation() -> None:
    ledger = ledger_of()
    for lease in [lease_of(ledger, demand(name)) for name in "ab"]:
        finish(ledger, lease, load_ms=2500.0)
    assert {one.generation for one in ledger.residencies} == {2}
    assert len(chains(ledger)) == 2


@pytest.mark.parametrize(
    "now",
    [[replace(MODEL, loaded=False)], [replace(MODEL, context_tokens=50)], []],
    ids=["unloaded", "another context", "no longer listed"],
)
def test_a_model_that_lost_its_cache_begins_a_new_generation(now: list[EngineModel]) -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    ledger.engine_seen(now, None, 1)
    assert not chains(ledger)
    ledger.engine_seen([MODEL], None, 1)
    assert ledger.models.known()[0].generation >= 2
    assert ledger.epoch == 1


def test_an_engine_that_returns_begins_a_greater_epoch() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    running = lease_of(ledger, demand("b"))
    ledger.engine_lost()
    ledger.engine_seen([MODEL], None, 1)
    assert ledger.epoch == 2
    finish(ledger, running, epoch=1)
    assert not chains(ledger)
    assert (ledger.pool.active, ledger.pool.resident) == (0, 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ledger: ledger.set_draining(True), "NODE_DRAINING"),
        (lambda ledger: ledger.engine_lost(), "ENGINE_UNAVAILABLE"),
        (lambda ledger: ledger.engine_seen([], None, 1), "ENGINE_UNAVAILABLE"),
    ],
    ids=["drained", "the engine went", "the model went"],
)
def test_who_waits_is_refused_when_waiting_has_become_hopeless(change: Any, reason: str) -> None:
    ledger = ledger_of()
    for name in "ab":
        lease_of(ledger, demand(name))
    waiting = submit(ledger, demand("c"))
    change(ledger)
    assert isinstance(waiting.refusal, KvplaneError)
    assert waiting.refusal.reason == reason
    ledger.withdraw(waiting)


def test_a_smaller_budget_evicts_idle_prompts_and_leaves_running_ones() -> None:
    ledger = ledger_of([replace(MODEL, slots=4)], budget=None)
    assert ledger.pool.total == 40
    finish(ledger, lease_of(ledger, demand("a")))
    running = lease_of(ledger, demand("b", output_tokens=80))
    ledger.pool.resize(3)
    ledger.residencies.fit()
    assert not chains(ledger)
    assert ledger.pool.active == running.blocks > 3


def test_a_prompt_that_two_requests_run_at_once_is_remembered_once() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    claiming, beside = lease_of(ledger, demand("a")), lease_of(ledger, demand("a"))
    assert claiming.match is not None
    assert beside.match is None
    finish(ledger, beside)
    finish(ledger, claiming)
    assert chains(ledger) == [chain("a")]
    assert (ledger.pool.active, ledger.pool.resident) == (0, 2)
