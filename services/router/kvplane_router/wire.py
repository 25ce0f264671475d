"""Decisions as they go over the wire."""

from kvplane.router.v1 import router_pb2
from kvplane_router.costs import Candidate
from kvplane_router.decide import Decision
from kvplane_router.history import Told


def decision_to_proto(decision: Decision) -> router_pb2.Decision:
    """Return a decision for the caller."""
    chosen, refusal = decision.chosen, decision.refusal
    return router_pb2.Decision(
        request_id=decision.request_id,
        stage=router_pb2.Stage.Value(f"STAGE_{decision.stage.name}"),
        node_id=chosen.node.node_id if chosen else "",
        policy=decision.policy,
        estimated_prompt_tokens=decision.prompt_tokens,
        predicted_cached_tokens=chosen.cached.tokens if chosen else 0,
        attempts=decision.attempts,
        candidates=map(_candidate, decision.candidates),
        refusal_reason=f"{refusal.reason}: {refusal}" if refusal else "",
    )


def explanation(told: Told) -> router_pb2.ExplainResponse:
    """Return a decision with what came of it."""
    return router_pb2.ExplainResponse(
        decision=decision_to_proto(told.decision), completion=told.completion, error=told.error
    )


def _candidate(candidate: Candidate) -> router_pb2.Candidate:
    excluded, blocks = candidate.excluded, candidate.blocks
    return router_pb2.Candidate(
        node_id=candidate.node.node_id,
        total_ms=candidate.total_ms,
        load_ms=candidate.load_ms,
        slot_wait_ms=candidate.slot_wait_ms,
        prefill_ms=candidate.prefill_ms,
        eviction_ms=candidate.eviction_ms,
        predicted_cached_tokens=candidate.cached.tokens,
        evicted_blocks=candidate.evicted_blocks,
        free_blocks_after=blocks.free_after if blocks else None,
        excluded_reason=f"{excluded.reason}: {excluded}" if excluded else "",
        measured=candidate.measured,
    )
