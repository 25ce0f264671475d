"""Blocks, budget, rates, evidence and resident prompts, as tables."""

from dataclasses import replace
from typing import Any

import pytest

from kvplane.common.v1 import generation_pb2
from kvplane.common.v1.generation_pb2 import (
    EVIDENCE_INFERRED,
    EVIDENCE_MEASURED,
    EVIDENCE_PREDICTED,
    EVIDENCE_UNSPECIFIED,
)
from kvplane_common.chains import Chain
from kvplane_node_agent.blocks import BlockPool, total_blocks
from kvplane_node_agent.budget import kv_budget_bytes
from kvplane_node_agent.engines.base import EngineModel, Finished
from kvplane_node_agent.evidence import Verdict, judge, usage_of
from kvplane_node_agent.rates import Rates
from kvplane_node_agent.residency import Residencies, Residency, cut

MIB = 1024 * 1024
STOP = generation_pb2.FINISH_REASON_STOP


class Journal:
    """Keeps what it hears of, as the metastore would."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, bytes], Residency] = {}

    def put(self, residency: Residency) -> None:
        self.known[residency.key] = residency

    def delete(self, residency: Residency) -> None:
        self.known.pop(residency.key, None)


def chain(*names: str) -> Chain:
    """A chain of 100 bytes a name; two of them share what they begin with."""
    digests = tuple("".join(names[: end + 1]).encode().rjust(8, b".") for end in range(len(names)))
    return Chain(digests, tuple(100 * (end + 1) for end in range(len(names))))


def resident(*names: str, blocks: int = 1, **fields: Any) -> Residency:
    values: dict[str, Any] = {
        "model": "m", "chain": chain(*names), "prompt_tokens": 25 * len(names),
        "tokens": 25 * len(names) + 5, "kv_bytes": blocks * 16, "blocks": blocks, "epoch": 1,
        "generation": 1, "evidence": EVIDENCE_PREDICTED, "create_ms": 1, "last_use_ms": 1,
    }  # fmt: skip
    return Residency(**{**values, **fields})


def books(total: int | None = 10, most: int = 4096) -> tuple[BlockPool, Residencies, Journal]:
    pool, journal = BlockPool(16, total), Journal()
    return pool, Residencies(pool, journal, most), journal


@pytest.mark.parametrize(
    ("kv_bytes", "blocks"),
    [(None, 0), (0.0, 1), (1.0, 1), (16.0 * MIB, 1), (16.0 * MIB + 1, 2), (100.0 * MIB, 7)],
)
def test_required_blocks_are_rounded_up_and_at_least_one(
    kv_bytes: float | None, blocks: int
) -> None:
    assert BlockPool(16 * MIB, 10).required(kv_bytes) == blocks


@pytest.mark.parametrize(
    ("budget", "blocks"), [(None, None), (0, 0), (15 * MIB, 0), (16 * MIB, 1), (100 * MIB, 6)]
)
def test_the_budget_is_rounded_down_to_whole_blocks(budget: int | None, blocks: int | None) -> None:
    assert total_blocks(budget, 16 * MIB) == blocks


def test_everything_fits_in_a_pool_of_unknown_size() -> None:
    pool = BlockPool(16, None)
    pool.activate(1000)
    assert pool.fits(1000)
    assert pool.could_fit(1000)
    assert (pool.free, pool.over()) == (None, False)


LOADED = EngineModel("m", loaded=True, slots=2, context_tokens=1000, kv_bytes_per_token=1024.0)


@pytest.mark.parametrize(
    ("operator", "models", "free", "budget"),
    [
        (5, [LOADED], 7, 5),
        (None, [LOADED], 7, 2 * 16 * MIB),
        (None, [LOADED, LOADED], 7, 4 * 16 * MIB),
        (None, [LOADED, replace(LOADED, loaded=False, context_tokens=None)], 7, 2 * 16 * MIB),
        (None, [LOADED, replace(LOADED, kv_bytes_per_token=None)], 1000, 900),
        (None, [replace(LOADED, loaded=False)], 1000, 900),
        (None, [], None, None),
    ],
    ids=[
        "the operator's word comes first", "then the engine's slots, in whole blocks",
        "of all loaded models", "but not of others", "free memory where a geometry is unknown",
        "and where nothing is loaded", "else unknown",
    ],
)  # fmt: skip
def test_the_budget_comes_from_who_knows_best(
    operator: int | None, models: list[EngineModel], free: int | None, budget: int | None
) -> None:
    assert kv_budget_bytes(operator, models, free, 16 * MIB) == budget


def test_rates_are_unknown_until_measured_and_then_averaged() -> None:
    rates = Rates()
    rates.learn_prefill(31, 1.0)
    rates.learn_prefill(4000, 1e-300)
    rates.learn_decode(3, 1.0)
    rates.learn_bytes(10, 127)
    rates.learn_bytes(200 * 33, 200)
    rates.learn_bytes(99, 200)
    assert rates == Rates()
    rates.learn_prefill(100, 1000)
    rates.learn_prefill(200, 1000)
    assert rates.prefill_tokens_per_s == pytest.approx(130)
    rates.learn_bytes(800, 200)
    assert rates.bytes_per_token == 4


def test_a_long_prompt_tells_more_of_its_text_than_a_short_one() -> None:
    rates = Rates()
    rates.learn_bytes(8000, 2000)
    rates.learn_bytes(128, 128)
    assert rates.bytes_per_token == pytest.approx(3.7, abs=0.1)
    rates.learn_bytes(20_000, 20_000)
    assert rates.bytes_per_token == pytest.approx(1.2, abs=0.1)


@pytest.mark.parametrize(
    ("finished", "rate", "cached", "evidence"),
    [
        (Finished(STOP, prompt_tokens=100, cached_tokens=0), 1.0, 0, EVIDENCE_MEASURED),
        (Finished(STOP, prompt_tokens=100, cached_tokens=99), None, 99, EVIDENCE_MEASURED),
        (Finished(STOP, prompt_tokens=100, prefill_ms=20), 1000.0, 80, EVIDENCE_INFERRED),
        (Finished(STOP, prompt_tokens=100, prefill_ms=900), 1000.0, 0, EVIDENCE_INFERRED),
        (Finished(STOP, prompt_tokens=100, prefill_ms=0), 1000.0, 100, EVIDENCE_INFERRED),
        (Finished(STOP, prompt_tokens=100, load_ms=3000), None, 0, EVIDENCE_INFERRED),
        (Finished(STOP, prompt_tokens=100, prefill_ms=20), None, None, EVIDENCE_UNSPECIFIED),
        (Finished(STOP, prefill_ms=20), 1000.0, None, EVIDENCE_UNSPECIFIED),
        (Finished(STOP), None, None, EVIDENCE_UNSPECIFIED),
    ],
    ids=[
        "a counted zero is a miss", "a count is a measurement", "worked out from the time",
        "never below zero", "never over the prompt", "nothing was cached when it was just loaded",
        "no rate, no guess", "no prompt count, no guess", "nothing said is nothing known",
    ],
)  # fmt: skip
def test_cached_tokens_are_counted_inferred_or_absent(
    finished: Finished, rate: float | None, cached: int | None, evidence: int
) -> None:
    usage = usage_of(finished, rate)
    assert usage.evidence == evidence
    assert usage.HasField("cached_tokens") == (cached is not None)
    assert usage.cached_tokens == (cached or 0)


@pytest.mark.parametrize(
    ("predicted", "cached", "evidence", "whole", "verdict"),
    [
        (100, None, EVIDENCE_UNSPECIFIED, True, Verdict.UNKNOWN),
        (0, 50, EVIDENCE_MEASURED, True, Verdict.UNKNOWN),
        (100, 90, EVIDENCE_MEASURED, True, Verdict.CONFIRMED),
        (5, 4, EVIDENCE_MEASURED, True, Verdict.CONFIRMED),
        (100, 89, EVIDENCE_MEASURED, True, Verdict.SHRUNK),
        (100, 0, EVIDENCE_MEASURED, True, Verdict.GONE),
        (1, 0, EVIDENCE_MEASURED, True, Verdict.GONE),
        (100, 95, EVIDENCE_INFERRED, True, Verdict.CONFIRMED),
        (100, 0, EVIDENCE_INFERRED, True, Verdict.UNKNOWN),
        (100, 60, EVIDENCE_MEASURED, False, Verdict.UNKNOWN),
        (100, 40, EVIDENCE_MEASURED, False, Verdict.SHRUNK),
    ],
    ids=[
        "absent proves nothing", "nothing was expected", "most of it is there",
        "all but the last token of a short one", "a part is there", "an authoritative zero",
        "even of one token", "an inferred hit confirms", "an inferred miss does not condemn",
        "an estimated part may be a little off", "but not by far",
    ],
)  # fmt: skip
def test_what_came_out_judges_what_was_expected(
    predicted: int, cached: int | None, evidence: Any, whole: bool, verdict: Verdict
) -> None:
    usage = generation_pb2.Usage(cached_tokens=cached, evidence=evidence)
    assert judge(predicted, usage, whole=whole).verdict is verdict


@pytest.mark.parametrize(
    ("asked", "found", "shared", "whole"),
    [
        (chain("a", "b", "c"), ("a", "b"), 200, True),
        (chain("a", "b"), ("a", "b"), 200, True),
        (chain("a", "x"), ("a", "c"), 100, False),
        (chain("x"), None, 0, False),
    ],
    ids=["the turn it continues", "the same again", "the last used of those that share", "none"],
)
def test_the_best_match_shares_most(
    asked: Chain, found: tuple[str, ...] | None, shared: int, whole: bool
) -> None:
    _, residencies, _ = books()
    residencies.put(resident("a", "b"))
    residencies.put(resident("a", "c", last_use_ms=2))
    match = residencies.match("m", asked)
    if found is None:
        assert match is None
        return
    assert match is not None
    assert match.residency.chain == chain(*found)
    assert (match.shared_bytes, match.whole, match.tokens) == (shared, whole, shared // 4)
    assert residencies.match("other", asked) is None


def test_a_claimed_prompt_is_neither_matched_nor_evicted_nor_counted_as_idle() -> None:
    pool, residencies, _ = books()
    claimed = resident("a", blocks=3)
    residencies.put(claimed)
    residencies.claim(claimed)
    assert residencies.match("m", chain("a")) is None
    assert residencies.evict_oldest() is None
    assert pool.resident == 0
    residencies.unclaim(claimed)
    assert pool.resident == 3
    assert residencies.evict_oldest() == claimed


def test_the_oldest_make_room_for_a_new_one() -> None:
    pool, residencies, journal = books(total=4)
    for name in "abc":
        residencies.put(resident(name, blocks=2))
    assert [one.chain for one in residencies.idle()] == [chain("b"), chain("c")]
    assert pool.resident == 4
    assert set(journal.known) == {one.key for one in residencies}


def test_a_prompt_that_can_never_fit_is_not_remembered() -> None:
    pool, residencies, journal = books(total=4)
    pool.activate(3)
    residencies.put(resident("a", blocks=2))
    assert not list(residencies)
    assert not journal.known


def test_prompts_are_bounded_even_where_blocks_are_unknown() -> None:
    _, residencies, _ = books(total=None, most=3)
    for name in "abcde":
        residencies.put(resident(name, blocks=0))
    assert [one.chain for one in residencies.idle()] == [chain(name) for name in "cde"]


def test_a_prompt_shrinks_to_the_part_that_is_proven() -> None:
    pool, residencies, journal = books()
    long = resident("a", "b", "c", "d", blocks=4)
    residencies.put(long)
    residencies.shrink(long, 60, 32, now_ms=9)
    (left,) = residencies.idle()
    assert left.chain == chain("a", "b")
    assert (left.tokens, left.blocks, left.last_use_ms) == (60, 2, 9)
    assert left.evidence == EVIDENCE_MEASURED
    assert pool.resident == 2
    assert set(journal.known) == {left.key}


def test_a_prompt_of_which_less_than_a_step_is_proven_is_forgotten() -> None:
    pool, residencies, journal = books()
    short = resident("a", "b")
    residencies.put(short)
    residencies.shrink(short, 10, 16, now_ms=9)
    assert not list(residencies)
    assert not journal.known
    assert pool.resident == 0


def test_a_lost_cache_takes_claimed_prompts_with_it() -> None:
    pool, residencies, journal = books()
    claimed, idle, other = resident("a"), resident("b"), resident("c", model="other")
    for one in (claimed, idle, other):
        residencies.put(one)
    residencies.claim(claimed)
    residencies.drop("m")
    assert list(residencies) == [other]
    residencies.unclaim(claimed)
    assert list(residencies) == [other]
    assert (pool.resident, set(journal.known)) == (1, {other.key})


@pytest.mark.parametrize(
    ("bytes_", "names"), [(99, None), (100, ("a",)), (299, ("a", "b")), (900, ("a", "b", "c"))]
)
def test_a_chain_is_cut_at_a_digest(bytes_: int, names: tuple[str, ...] | None) -> None:
    assert cut(chain("a", "b", "c"), bytes_) == (chain(*names) if names else None)
