"""What a request costs on a node, part by part."""

from dataclasses import replace
from typing import Any

import pytest

from harness.routing import BLOCK_BYTES, MODEL, fleet, model, node
from kvplane_router.costs import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DEFAULT_SERVICE_MS,
    RETURN_CHANCE,
    Blocks,
    Cached,
    Candidate,
    Need,
    Rates,
    Residents,
    typical_rates,
    weigh,
)
from kvplane_router.fleet import Model, Node
from kvplane_router.reservations import InFlight

TYPICAL = Rates(prefill_tokens_per_s=1000.0, load_ms=7000.0, service_ms=3000.0)
NOW_MS = 60_000.0
PLAIN = Model(MODEL, slots=2, prefill_tokens_per_s=1000.0, service_ms=1000.0)


def weighed(
    told: Model = PLAIN,
    on: Node | None = None,
    cached: Cached | None = None,
    residents: Residents | None = None,
    local: InFlight | None = None,
    need: Need | None = None,
) -> Candidate:
    return weigh(
        on or Node("a"),
        told,
        need or Need(prompt_tokens=1000, answer_tokens=24),
        cached or Cached(),
        residents or Residents(),
        local or InFlight(),
        TYPICAL,
        NOW_MS,
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({}, (0, 0, 1000, 0)),
        ({"cached": Cached(900)}, (0, 0, 100, 0)),
        ({"cached": Cached(1000)}, (0, 0, 1, 0)),
        ({"told": replace(PLAIN, loaded=False, load_ms=4000.0)}, (4000, 0, 1000, 0)),
        ({"told": replace(PLAIN, loaded=False)}, (7000, 0, 1000, 0)),
        ({"told": replace(PLAIN, in_flight=1)}, (0, 0, 1000, 0)),
        ({"told": replace(PLAIN, in_flight=2)}, (0, 1000, 1000, 0)),
        ({"told": replace(PLAIN, in_flight=3)}, (0, 1000, 1000, 0)),
        ({"told": replace(PLAIN, in_flight=4)}, (0, 2000, 1000, 0)),
        ({"told": replace(PLAIN, in_flight=2, service_ms=None)}, (0, 3000, 1000, 0)),
        ({"told": replace(PLAIN, pending_tokens=500)}, (0, 0, 1500, 0)),
        ({"told": replace(PLAIN, prefill_tokens_per_s=None)}, (0, 0, 1000, 0)),
        ({"told": replace(PLAIN, prefill_tokens_per_s=100.0)}, (0, 0, 10_000, 0)),
        ({"residents": Residents(1, 500)}, (0, 0, 1000, 0)),
        ({"residents": Residents(2, 500)}, (0, 0, 1000, 500 * RETURN_CHANCE)),
        (
            {"residents": Residents(2, 500), "cached": Cached(900, continues=True)},
            (0, 0, 100, 0),
        ),
        (
            {"residents": Residents(2, 500), "cached": Cached(900)},
            (0, 0, 100, 500 * RETURN_CHANCE),
        ),
    ],
    ids=[
        "an idle node evaluates the whole prompt",
        "cached tokens are saved",
        "the last token is always evaluated",
        "weights must be loaded",
        "an unknown load time is the typical one",
        "a free slot is not waited for",
        "the last slot is taken",
        "two wait for two slots",
        "three wait for two slots",
        "an unknown service time is the typical one",
        "tokens that wait there come first",
        "an unknown rate is the typical one",
        "a slow node takes longer",
        "a free slot pushes nobody out",
        "without a free slot the coldest prompt is pushed out",
        "what continues a cached prompt pushes nobody out",
        "what branches off a cached prompt pushes one out",
    ],
)
def test_each_part_of_the_cost(arguments: dict[str, Any], parts: tuple[float, ...]) -> None:
    made = weighed(**arguments)
    found = (made.load_ms, made.slot_wait_ms, made.prefill_ms, made.eviction_ms)
    assert found == pytest.approx(parts)
    assert made.total_ms == pytest.approx(sum(parts))


@pytest.mark.parametrize(
    ("local", "reported", "in_flight", "prefill_ms"),
    [
        (InFlight(), {"in_flight": 1, "pending_tokens": 50}, 1, 1050),
        (InFlight(1, 50), {}, 1, 1050),
        (InFlight(1, 50), {"in_flight": 2, "pending_tokens": 20}, 2, 1050),
        (InFlight(3, 10), {"in_flight": 2, "pending_tokens": 20}, 3, 1020),
    ],
    ids=["only reported", "only local", "more reported", "more local"],
)
def test_the_greater_of_local_and_reported_load_counts(
    local: InFlight, reported: dict[str, Any], in_flight: int, prefill_ms: float
) -> None:
    made = weighed(replace(PLAIN, **reported), local=local)
    assert made.in_flight == in_flight
    assert made.prefill_ms == pytest.approx(prefill_ms)


# One token takes a hundredth of a block, so the request of 1,024 tokens needs 11.
COUNTED = replace(PLAIN, kv_bytes_per_token=BLOCK_BYTES / 100)


@pytest.mark.parametrize(
    ("total", "active", "resident", "cached", "local", "blocks"),
    [
        (20, 0, 0, Cached(), 0, Blocks(11, 0, evicted=0, free_after=9)),
        (20, 5, 0, Cached(), 0, Blocks(11, 5, evicted=0, free_after=4)),
        (20, 5, 0, Cached(), 7, Blocks(11, 7, evicted=0, free_after=2)),
        (20, 0, 12, Cached(), 0, Blocks(11, 0, evicted=3, free_after=0)),
        (20, 0, 12, Cached(500, continues=True), 0, Blocks(11, 0, evicted=0, free_after=2)),
        (20, 0, 12, Cached(500), 0, Blocks(11, 0, evicted=3, free_after=0)),
        (None, 0, 0, Cached(), 0, None),
    ],
    ids=[
        "an empty pool",
        "running requests hold some",
        "this router knows of more running than the node has told",
        "idle prompts must go",
        "a continued prompt hands over its blocks",
        "a branch needs blocks of its own",
        "no budget is known",
    ],
)
def test_blocks(
    total: int | None,
    active: int,
    resident: int,
    cached: Cached,
    local: int,
    blocks: Blocks | None,
) -> None:
    on = Node(
        "a",
        block_bytes=BLOCK_BYTES,
        total_blocks=total,
        active_blocks=active,
        resident_blocks=resident,
    )
    made = weighed(COUNTED, on, cached, local=InFlight(blocks=local))
    assert made.blocks == blocks


@pytest.mark.parametrize(
    ("in_flight", "since_ms", "slot_wait_ms"),
    [
        (1, (NOW_MS - 9000,), 0),
        (2, (NOW_MS - 9000, NOW_MS - 20_000), 9000),
        (4, (NOW_MS - 9000, NOW_MS - 20_000), 9000 + 1000),
        (2, (NOW_MS - 9000, NOW_MS - 200), 1000),
        (2, (NOW_MS - 9000,), 1000),
    ],
    ids=[
        "a slot is free",
        "both slots are held by long answers",
        "others wait already",
        "one answer has just begun",
        "of one slot nothing is known",
    ],
)
def test_what_has_run_for_long_is_expected_to_go_on_for_as_long(
    in_flight: int, since_ms: tuple[float, ...], slot_wait_ms: float
) -> None:
    local = InFlight(in_flight, answering_since_ms=since_ms)
    assert weighed(local=local).slot_wait_ms == pytest.approx(slot_wait_ms)


@pytest.mark.parametrize(
    ("need", "required"),
    [
        (Need(1000), 13),
        (Need(5000, answer_tokens=24), 20),
        (Need(5000), 20),
        (Need(5000, answer_tokens=24, least_prompt_tokens=1976), 20),
        (Need(5000, answer_tokens=24, least_prompt_tokens=1977), 21),
        (Need(1000, answer_tokens=2100), 21),
    ],
    ids=[
        "an answer of unknown length",
        "an estimate over all there is",
        "the same without a limit of the answer",
        "the least that it takes just fits",
        "the least that it takes does not",
        "the answer alone does not",
    ],
)
def test_more_blocks_than_there_are_are_needed_only_beyond_doubt(need: Need, required: int) -> None:
    on = Node("a", block_bytes=BLOCK_BYTES, total_blocks=20)
    blocks = weighed(COUNTED, on, need=need).blocks
    assert blocks is not None
    assert blocks.required == required


def test_no_request_needs_more_than_a_whole_context() -> None:
    on = Node("a", block_bytes=BLOCK_BYTES, total_blocks=20)
    made = weighed(replace(COUNTED, context_tokens=500), on)
    assert made.blocks == Blocks(5, 0, evicted=0, free_after=15)


def test_a_short_pool_costs_the_prompt_that_must_go() -> None:
    on = Node("a", block_bytes=BLOCK_BYTES, total_blocks=20, resident_blocks=12)
    assert weighed(COUNTED, on, residents=Residents(1, 200)).eviction_ms == pytest.approx(
        200 * RETURN_CHANCE
    )


@pytest.mark.parametrize(
    ("told", "measured"),
    [
        (PLAIN, True),
        (replace(PLAIN, prefill_tokens_per_s=None), False),
        (replace(PLAIN, loaded=False), False),
        (replace(PLAIN, loaded=False, load_ms=1.0), True),
        (replace(PLAIN, service_ms=None), True),
        (replace(PLAIN, service_ms=None, in_flight=2), False),
    ],
    ids=["all", "no rate", "no load time", "load time", "no wait to know", "wait not known"],
)
def test_a_cost_is_measured_when_each_figure_in_it_is_the_nodes_own(
    told: Model, measured: bool
) -> None:
    assert weighed(told).measured is measured


def test_what_a_node_does_not_know_is_the_median_of_those_that_do() -> None:
    nodes = fleet(
        node("a", model(prefill_tokens_per_s=100.0)),
        node("b", model(prefill_tokens_per_s=300.0)),
        node("c", model(prefill_tokens_per_s=900.0)),
        node("d", model(prefill_tokens_per_s=None)),
    )
    assert typical_rates(nodes, MODEL).prefill_tokens_per_s == 300.0


def test_what_nobody_knows_is_the_default() -> None:
    rates = typical_rates(fleet(node("a", model(prefill_tokens_per_s=0, service_ms=None))), MODEL)
    assert rates.prefill_tokens_per_s == DEFAULT_PREFILL_TOKENS_PER_S
    assert rates.service_ms == DEFAULT_SERVICE_MS
