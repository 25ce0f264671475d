"""What a finished request leaves in the cache, and what it proves of what was believed."""

from dataclasses import replace

from kvplane.common.v1 import generation_pb2
from kvplane_node_agent.admission import Lease
from kvplane_node_agent.blocks import BlockPool
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.evidence import Judgement, Verdict, judge
from kvplane_node_agent.residency import Residencies, Residency
from kvplane_node_agent.served import ServedModel


class Settlement:
    """Turns what the engine measured into beliefs about its cache."""

    def __init__(self, pool: BlockPool, residencies: Residencies) -> None:
        self._pool = pool
        self._residencies = residencies

    def settle(
        self,
        lease: Lease,
        model: ServedModel,
        usage: generation_pb2.Usage,
        epoch: int,
        now_ms: int,
    ) -> None:
        """Remember the prompt of a lease that was given back, in place of the one it continued."""
        new = self._resident(lease, model, usage, epoch, now_ms)
        match = lease.match
        if match is not None and self._residencies.is_idle(match.residency):
            judgement = judge(match.tokens, usage, whole=match.whole)
            if match.whole and new is not None:
                self._residencies.forget(match.residency)
                new = _succeed(new, match.residency, judgement, usage)
            else:
                self._correct(match.residency, judgement, model, now_ms)
        if new is not None:
            self._residencies.put(new)

    def _correct(
        self, residency: Residency, judgement: Judgement, model: ServedModel, now_ms: int
    ) -> None:
        if judgement.verdict is Verdict.GONE:
            self._residencies.forget(residency)
        elif judgement.verdict is Verdict.SHRUNK:
            tokens = judgement.proven_tokens
            kv_bytes = int(model.kv_bytes(tokens) or 0)
            self._residencies.shrink(residency, tokens, kv_bytes, now_ms)
        elif judgement.verdict is Verdict.CONFIRMED:
            self._residencies.touch(residency, now_ms)

    def _resident(
        self,
        lease: Lease,
        model: ServedModel,
        usage: generation_pb2.Usage,
        epoch: int,
        now_ms: int,
    ) -> Residency | None:
        if lease.demand.chain is None:
            return None
        prompt_tokens, tokens = _tokens(lease.demand, model, usage)
        kv_bytes = model.kv_bytes(tokens)
        return Residency(
            model=lease.demand.model,
            chain=lease.demand.chain,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            kv_bytes=int(kv_bytes or 0),
            blocks=self._pool.required(kv_bytes),
            epoch=epoch,
            generation=model.generation,
            evidence=generation_pb2.EVIDENCE_PREDICTED,
            create_ms=now_ms,
            last_use_ms=now_ms,
        )


def _tokens(demand: Demand, model: ServedModel, usage: generation_pb2.Usage) -> tuple[int, int]:
    """Return the tokens of the prompt, and with the answer; estimated where nobody counted."""
    counted = usage.HasField("prompt_tokens")
    prompt_tokens = usage.prompt_tokens if counted else demand.prompt_tokens(model)
    answered = usage.HasField("completion_tokens")
    tokens = prompt_tokens + (usage.completion_tokens if answered else demand.output_tokens)
    most = model.info.context_tokens
    return prompt_tokens, tokens if answered or most is None else min(tokens, most)


def _counted(usage: generation_pb2.Usage) -> bool:
    return usage.HasField("prompt_tokens") and usage.HasField("completion_tokens")


def _succeed(
    new: Residency, before: Residency, judgement: Judgement, usage: generation_pb2.Usage
) -> Residency:
    if judgement.verdict is Verdict.GONE:
        return new
    # A record of estimated size stays a prediction.
    confirmed = judgement.verdict is Verdict.CONFIRMED and _counted(usage)
    return replace(
        new,
        evidence=usage.evidence if confirmed else new.evidence,
        create_ms=before.create_ms if before.key == new.key else new.create_ms,
        hits=before.hits + (usage.cached_tokens > 0),
    )
