"""The node's books under any order of events."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplane.common.v1 import generation_pb2
from kvplane_common.chains import Chain
from kvplane_common.errors import KvplaneError
from kvplane_node_agent.admission import Lease, Ticket
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.engines.base import EngineModel, Finished
from kvplane_node_agent.ledger import Ledger, Limits
from kvplane_node_agent.residency import Key, Residency

MODELS = (
    EngineModel("a", loaded=True, slots=2, context_tokens=200, kv_bytes_per_token=1.0),
    EngineModel("b", loaded=True, slots=1, context_tokens=200, kv_bytes_per_token=2.0),
    EngineModel("c", loaded=True, slots=1),
)
QUEUE_LIMIT = 2
TOTAL_BLOCKS = 30

REASONS = {
    "MODEL_NOT_FOUND", "KV_BUDGET_EXCEEDED", "KV_BLOCKS_BUSY", "QUEUE_FULL", "CONTEXT_EXCEEDED",
    "ENGINE_UNAVAILABLE", "NODE_DRAINING",
}  # fmt: skip

paths = st.sampled_from(["x", "xy", "xyz", "xz", "z"])
tokens = st.none() | st.integers(0, 150)
seldom = st.integers(0, 9).map(lambda number: number == 9)


class Records:
    """What the metastore would hold."""

    def __init__(self) -> None:
        self.known: dict[Key, Residency] = {}

    def put(self, residency: Residency) -> None:
        self.known[residency.key] = residency

    def delete(self, residency: Residency) -> None:
        self.known.pop(residency.key, None)


def chain(path: str) -> Chain:
    ends = range(1, len(path) + 1)
    return Chain(tuple(path[:end].rjust(8).encode() for end in ends), tuple(80 * e for e in ends))


class Books(RuleBasedStateMachine):
    """Requests come, wait, run, end, fail; models unload; the engine dies and returns."""

    def __init__(self) -> None:
        super().__init__()
        self.records = Records()
        limits = Limits(10, QUEUE_LIMIT, TOTAL_BLOCKS * 10)
        self.ledger = Ledger("n1", limits, 1, self.records)
        self.ledger.engine_seen(MODELS, None, 1)
        self.tickets: list[Ticket] = []
        self.now_ms = 0
        self.reasons: set[str] = set()

    @property
    def live(self) -> list[Ticket]:
        return [
            ticket
            for ticket in self.tickets
            if ticket.refusal is None and (ticket.lease is None or not ticket.lease.released)
        ]

    @property
    def leases(self) -> list[Lease]:
        return [ticket.lease for ticket in self.live if ticket.lease is not None]

    @rule(model=st.sampled_from("aaaabcd"), path=st.none() | paths, output=st.integers(1, 400))
    def a_request_comes(self, model: str, path: str | None, output: int) -> None:
        known = chain(path) if path else None
        demand = Demand(model, known, known.length_bytes if known else None, output)
        try:
            self.tickets.append(self.ledger.submit(demand, lambda: None))
        except KvplaneError as refusal:
            self.reasons.add(refusal.reason)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), prompt=tokens, cached=tokens, answer=tokens, load=seldom)
    def a_request_ends(self, data: Any, prompt: Any, cached: Any, answer: Any, load: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        finished = Finished(
            generation_pb2.FINISH_REASON_STOP,
            prompt_tokens=prompt,
            cached_tokens=None if cached is None else min(cached, prompt or 0),
            completion_tokens=answer,
            load_ms=2000.0 if load else None,
            prefill_ms=10.0,
        )
        self.now_ms += 1
        self.ledger.finish(lease, finished, self.ledger.epoch, self.now_ms, 1.0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def a_request_fails(self, data: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.ledger.abandon(lease)
        with pytest.raises(RuntimeError):
            self.ledger.abandon(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), path=st.none() | paths, size=st.integers(1, 400))
    def a_reservation_is_used(self, data: Any, path: str | None, size: int) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        demand = Demand(lease.demand.model, chain(path) if path else None, size, size)
        before, blocks = lease.demand, lease.blocks
        try:
            adopted = self.ledger.adopt(lease, demand)
        except KvplaneError as refusal:
            self.reasons.add(refusal.reason)
            self.ledger.abandon(lease)
            return
        assert (lease.demand, lease.blocks) == (demand if adopted else before, blocks)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_client_goes_away(self, data: Any) -> None:
        ticket = data.draw(st.sampled_from(self.live))
        self.tickets.remove(ticket)
        self.ledger.withdraw(ticket)

    @rule(model=st.sampled_from(["", "a", "b"]))
    def prompts_are_evicted(self, model: str) -> None:
        self.ledger.evict(model, b"")

    @rule(
        present=st.just(MODELS) | st.lists(st.sampled_from(MODELS), unique=True),
        lost=seldom,
        draining=seldom,
    )
    def the_node_fares(self, present: Sequence[EngineModel], lost: bool, draining: bool) -> None:
        if lost:
            self.ledger.engine_lost()
        else:
            self.ledger.engine_seen(present, None, 1)
        self.ledger.set_draining(draining)

    @invariant()
    def blocks_add_up_and_never_exceed_the_pool(self) -> None:
        pool, residencies = self.ledger.pool, self.ledger.residencies
        assert pool.active == sum(lease.blocks for lease in self.leases)
        assert pool.resident == sum(one.blocks for one in residencies.idle())
        assert pool.active + pool.resident <= TOTAL_BLOCKS

    @invariant()
    def what_is_claimed_stays_until_its_request_ends_or_its_cache_is_lost(self) -> None:
        residencies = self.ledger.residencies
        live = {one.key for one in residencies}
        for lease in self.leases:
            match = lease.match
            if match is None or not match.whole:
                continue
            assert lease.blocks >= match.residency.blocks
            model = self.ledger.models.get(lease.demand.model)
            lost = model is None or model.generation != lease.generation
            if not lost and match.residency.epoch == self.ledger.epoch:
                assert match.residency.key in live
                assert not residencies.is_idle(match.residency)

    @invariant()
    def slots_and_queues_keep_their_bounds(self) -> None:
        slots = {model.name: model.slots for model in MODELS}
        for work in self.ledger.admission.work():
            assert work.active <= slots[work.model]
            assert work.queued <= QUEUE_LIMIT
            assert work.pending_prefill_tokens >= 0

    @invariant()
    def every_refusal_is_one_that_the_contract_names(self) -> None:
        assert self.reasons <= REASONS

    @invariant()
    def the_records_tell_the_same(self) -> None:
        residencies = list(self.ledger.residencies)
        assert self.records.known == {one.key: one for one in residencies}
        assert len(residencies) == len(self.records.known)

    def teardown(self) -> None:
        for ticket in self.live:
            if ticket.refusal is None:
                self.tickets.remove(ticket)
                self.ledger.withdraw(ticket)
        assert not self.leases
        assert not self.ledger.admission.work()
        assert self.ledger.pool.active == 0
        assert self.ledger.residencies.claimed_count == 0


Books.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestBooks = Books.TestCase
