"""What a reservation is worth to its request, and what a count is worth to a record."""

from dataclasses import replace
from typing import Any

import pytest

from kvplane.common.v1 import generation_pb2
from kvplane_common.chains import Chain
from kvplane_common.errors import KvplaneError
from kvplane_node_agent.admission import Lease
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.engines.base import EngineModel, Finished
from kvplane_node_agent.ledger import Ledger, Limits
from kvplane_node_agent.residency import Residency

MODEL = EngineModel("m", loaded=True, slots=2, context_tokens=100, kv_bytes_per_token=1.0)


class NoJournal:
    def put(self, residency: Residency) -> None: ...

    def delete(self, residency: Residency) -> None: ...


def chain(*names: str) -> Chain:
    digests = tuple("".join(names[: end + 1]).encode().rjust(8, b".") for end in range(len(names)))
    return Chain(digests, tuple(40 * (end + 1) for end in range(len(names))))


def demand(*names: str) -> Demand:
    return Demand("m", chain(*names), 40 * len(names), 5)


def ledger_of(budget: int = 100) -> Ledger:
    limits = Limits(block_bytes=10, queue_limit=1, kv_budget_bytes=budget)
    ledger = Ledger("n1", limits, 1, NoJournal())
    ledger.engine_seen([MODEL], None, 1)
    return ledger


def lease_of(ledger: Ledger, wanted: Demand) -> Lease:
    lease = ledger.submit(wanted, lambda: None).lease
    assert lease is not None
    return lease


def finish(ledger: Ledger, lease: Lease, **fields: Any) -> None:
    values: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": 5, **fields}
    finished = Finished(generation_pb2.FINISH_REASON_STOP, **values)
    ledger.finish(lease, finished, 1, 5_000, 100.0)


def chains(ledger: Ledger) -> list[Chain]:
    return [one.chain for one in ledger.residencies]


def test_a_reservation_serves_the_request_that_it_was_made_for() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    lease = lease_of(ledger, demand("a", "b"))
    assert ledger.adopt(lease, replace(demand("a", "b"), prompt_bytes=70))
    assert lease.match is not None
    assert (lease.demand.prompt_bytes, lease.pending_prefill_tokens) == (70, 18 - 10)


def test_a_reservation_that_is_too_small_is_not_used_and_stays_as_it_was() -> None:
    ledger = ledger_of()
    lease = lease_of(ledger, demand("a"))
    before = lease.demand
    assert not ledger.adopt(lease, demand("a", "b", "c"))
    assert (lease.demand, lease.blocks, ledger.pool.active) == (before, 2, 2)


def test_a_reservation_for_another_prompt_lets_go_of_what_it_expected_in_the_cache() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    lease = lease_of(ledger, demand("a"))
    assert ledger.adopt(lease, demand("x"))
    finish(ledger, lease, cached_tokens=0)
    assert set(chains(ledger)) == {chain("a"), chain("x")}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (replace(demand("a"), prompt_bytes=32 * 101), "CONTEXT_EXCEEDED"),
        (replace(demand("a"), output_tokens=99), "KV_BUDGET_EXCEEDED"),
    ],
    ids=["context", "budget"],
)
def test_a_reservation_is_no_way_around_what_can_never_be_served(
    asked: Demand, reason: str
) -> None:
    ledger = ledger_of(budget=50)
    lease = lease_of(ledger, demand("a"))
    with pytest.raises(KvplaneError) as refused:
        ledger.adopt(lease, asked)
    assert refused.value.reason == reason


def test_a_reservation_claims_what_its_real_prompt_continues() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    lease = lease_of(ledger, demand("x", "y"))
    assert ledger.adopt(lease, demand("a", "b"))
    assert lease.predicted_cached_tokens == 10
    assert not ledger.residencies.idle()


def test_a_reservation_is_used_in_the_generation_of_its_request() -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")))
    lease = lease_of(ledger, demand("a"))
    for loaded in (False, True):
        ledger.engine_seen([replace(MODEL, loaded=loaded)], None, 1)
    assert ledger.adopt(lease, demand("a"))
    assert (lease.generation, lease.match) == (2, None)


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        ({"prompt_tokens": 12, "completion_tokens": 3}, 15),
        ({"prompt_tokens": 12, "completion_tokens": None}, 12 + 5),
        ({"prompt_tokens": None, "completion_tokens": 3}, 10 + 3),
        ({"prompt_tokens": None, "completion_tokens": None}, 10 + 5),
    ],
    ids=["both counted", "no count of the answer", "no count of the prompt", "nothing counted"],
)
def test_what_nobody_counted_is_estimated_and_not_zero(counts: dict[str, Any], tokens: int) -> None:
    ledger = ledger_of()
    finish(ledger, lease_of(ledger, demand("a")), **counts)
    (residency,) = ledger.residencies
    assert residency.tokens == tokens
    assert residency.evidence == generation_pb2.EVIDENCE_PREDICTED
