"""The books of a node: all that is decided here, without engine, network, clock or event loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import EngineUnavailableError, NodeDrainingError
from kvplane_node_agent.admission import Admission, Lease, Ticket
from kvplane_node_agent.blocks import BlockPool, total_blocks
from kvplane_node_agent.budget import kv_budget_bytes
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.engines.base import EngineModel, Finished
from kvplane_node_agent.evidence import usage_of, was_cold
from kvplane_node_agent.residency import Journal, Residencies
from kvplane_node_agent.served import ServedModel, ServedModels
from kvplane_node_agent.settle import Settlement

_ENGINE_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator says of the node."""

    block_bytes: int
    queue_limit: int
    kv_budget_bytes: int | None = None
    """None: told by the engine, or by the GPUs."""


class Ledger:
    """Blocks, cached prompts, slots, queues and rates, changed only together.

    `epoch` names the life of the engine's cache; whatever is remembered belongs to it.
    """

    def __init__(self, node_id: str, limits: Limits, epoch: int, journal: Journal) -> None:
        self.node_id = node_id
        self.limits = limits
        self.epoch = epoch
        self.pool = BlockPool(
            limits.block_bytes, total_blocks(limits.kv_budget_bytes, limits.block_bytes)
        )
        self.models = ServedModels()
        self.residencies = Residencies(self.pool, journal)
        self.admission = Admission(self.pool, self.residencies, self.models, limits.queue_limit)
        self._settlement = Settlement(self.pool, self.residencies)
        self._engine_ever_seen = False
        self.draining = False
        self.stopping = False
        self.engine_present = False

    def submit(self, demand: Demand, on_decided: Callable[[], None]) -> Ticket:
        """Admit a request or put it in the queue; raises the refusal. See Admission.submit."""
        if not self.engine_present:
            raise self._engine_away()
        if self.draining or self.stopping:
            raise self._draining()
        return self.admission.submit(demand, on_decided)

    def withdraw(self, ticket: Ticket) -> None:
        """Take back a request that nobody wants any more, waiting or admitted."""
        self.admission.withdraw(ticket)

    def adopt(self, lease: Lease, demand: Demand) -> bool:
        """Let a request use a reserved lease; False if it needs more. See Admission.adopt."""
        return self.admission.adopt(lease, demand)

    def abandon(self, lease: Lease) -> None:
        """Take back a lease whose request did not end well; beliefs stay as they were."""
        self.admission.release(lease)
        self.admission.admit_waiting(lease.demand.model)

    def finish(
        self, lease: Lease, finished: Finished, epoch: int, now_ms: int, service_ms: float
    ) -> generation_pb2.Usage:
        """Take back a lease whose request ended well, learn from it, and return its usage.

        `epoch` is that in which the request began; what an engine did that is gone since is not
        remembered. `now_ms` is the wall clock, `service_ms` how long the slot was held.
        """
        model = self.models.get(lease.demand.model)
        usage = usage_of(finished, model.rates.prefill_tokens_per_s if model else None)
        self.admission.release(lease)
        if model is not None and epoch == self.epoch:
            _learn(model, lease.demand, finished, usage, service_ms)
            if was_cold(finished) and lease.generation == model.generation:
                self._new_generation(model)
            self._settlement.settle(lease, model, usage, self.epoch, now_ms)
        self.admission.admit_waiting(lease.demand.model)
        return usage

    def engine_seen(
        self, models: Sequence[EngineModel], free_bytes: int | None, epoch: int
    ) -> None:
        """Take what the engine serves now. `epoch` is the next one, used if it was away."""
        if self._engine_ever_seen and not self.engine_present:
            self.new_epoch(epoch)
        self.engine_present = self._engine_ever_seen = True
        for name in self.models.update(models):
            self.residencies.drop(name)
        self._resize(models, free_bytes)
        for model in self.models.known():
            self._serve_waiting(model)

    def new_epoch(self, epoch: int) -> None:
        """Begin a new life, greater than the last one: nothing that was cached is any more."""
        self.epoch = max(epoch, self.epoch + 1)
        self.residencies.drop()

    def engine_lost(self) -> None:
        """Take every model away and refuse who waits."""
        self.engine_present = False
        self.models.leave()
        self.admission.refuse_waiting(self._engine_away)

    def is_loaded(self, model: str) -> bool:
        """Tell whether the engine had a model's weights in memory when it was last looked at."""
        known = self.models.get(model)
        return known is not None and known.info.loaded

    def evict(self, model: str, digest: bytes) -> int:
        """Forget the idle prompts of a model and a digest; of any where that is empty."""
        wanted = [
            residency
            for residency in self.residencies.idle()
            if model in ("", residency.model) and digest in (b"", residency.chain.last)
        ]
        return sum(self.residencies.forget(residency) for residency in wanted)

    def set_draining(self, draining: bool) -> None:
        """Stop admitting, or begin again. Who waits is refused, to find another node."""
        self.draining = draining
        if draining:
            self.admission.refuse_waiting(self._draining)

    def stop(self) -> None:
        """Stop admitting for good."""
        self.stopping = True
        self.admission.refuse_waiting(self._draining)

    def _resize(self, models: Sequence[EngineModel], free_bytes: int | None) -> None:
        block_bytes = self.limits.block_bytes
        budget = kv_budget_bytes(self.limits.kv_budget_bytes, models, free_bytes, block_bytes)
        self.pool.resize(total_blocks(budget, block_bytes))
        self.residencies.fit()

    def _serve_waiting(self, model: ServedModel) -> None:
        if model.present:
            self.admission.admit_waiting(model.info.name)
        else:
            gone = partial(self._engine_away, model.info.name)
            self.admission.refuse_waiting(gone, model.info.name)

    def _new_generation(self, model: ServedModel) -> None:
        model.generation += 1
        self.residencies.drop(model.info.name)

    def _engine_away(self, model: str = "") -> EngineUnavailableError:
        what = f"the engine no longer lists {model!r}" if model else "the engine does not answer"
        return EngineUnavailableError(
            f"{what}; retry later or on another node",
            retry_after_ms=_ENGINE_RETRY_MS,
            node_id=self.node_id,
        )

    def _draining(self) -> NodeDrainingError:
        why = "is stopping" if self.stopping else "is drained"
        return NodeDrainingError(
            f"node {self.node_id!r} {why} and takes no new work; use another", node_id=self.node_id
        )


def _learn(
    model: ServedModel,
    demand: Demand,
    finished: Finished,
    usage: generation_pb2.Usage,
    service_ms: float,
) -> None:
    rates = model.rates
    rates.learn_service(service_ms)
    if was_cold(finished) and finished.load_ms is not None:
        rates.learn_load(finished.load_ms)
    # An inferred count comes from the rate, and must not flow back into it; a cold one is certain.
    certain = usage.evidence == generation_pb2.EVIDENCE_MEASURED or was_cold(finished)
    if certain and usage.HasField("prompt_tokens") and finished.prefill_ms is not None:
        rates.learn_prefill(usage.prompt_tokens - usage.cached_tokens, finished.prefill_ms)
    if usage.HasField("completion_tokens") and finished.decode_ms is not None:
        rates.learn_decode(usage.completion_tokens, finished.decode_ms)
    if usage.HasField("prompt_tokens") and demand.prompt_bytes is not None:
        rates.learn_bytes(demand.prompt_bytes, usage.prompt_tokens)
