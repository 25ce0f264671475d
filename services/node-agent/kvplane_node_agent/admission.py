"""Who may run now, who waits, and who is refused, with the reason and the numbers.

A request that runs holds a lease: one slot of its model, and blocks of the node's pool. Those that
find no slot wait in a bounded queue, first come first served. Blocks are never waited for: what
cannot be had by evicting idle prompts is refused, so that the caller can go elsewhere.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvplane_common.errors import (
    ContextExceededError,
    KvBlocksBusyError,
    KvBudgetExceededError,
    KvplaneError,
    ModelNotFoundError,
    QueueFullError,
)
from kvplane_node_agent.blocks import BlockPool
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.residency import Match, Residencies
from kvplane_node_agent.served import ServedModel, ServedModels

_RETRY_UNKNOWN_MS = 1000


@dataclass(eq=False, slots=True)
class Lease:
    """What a running request holds. Invariant: given back exactly once."""

    demand: Demand
    generation: int
    blocks: int
    evicted_blocks: int
    match: Match | None
    pending_prefill_tokens: int
    """Estimated prompt tokens still to be evaluated; 0 once the answer has begun."""
    released: bool = False

    @property
    def predicted_cached_tokens(self) -> int:
        """Prompt tokens that are expected to be in the cache."""
        return self.match.tokens if self.match else 0


@dataclass(eq=False, slots=True)
class Ticket:
    """A request's place: it waits until it has a lease or a refusal."""

    demand: Demand
    on_decided: Callable[[], None]
    pending_prefill_tokens: int
    lease: Lease | None = None
    refusal: Exception | None = None
    """A KvplaneError, or what went wrong unexpectedly with this request."""


@dataclass(slots=True)
class _Desk:
    running: set[Lease] = field(default_factory=set)
    waiting: deque[Ticket] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Work:
    """What one model is doing."""

    model: str
    active: int
    queued: int
    pending_prefill_tokens: int


class Admission:
    """Slots and queue of each model, over one pool of blocks."""

    def __init__(
        self, pool: BlockPool, residencies: Residencies, models: ServedModels, queue_limit: int
    ) -> None:
        self.queue_limit = queue_limit
        self._pool = pool
        self._residencies = residencies
        self._models = models
        self._desks: dict[str, _Desk] = {}

    def submit(self, demand: Demand, on_decided: Callable[[], None]) -> Ticket:
        """Return the request's ticket, with a lease if it may run at once.

        Otherwise `on_decided` is called when it has a lease or a refusal. Raises
        ModelNotFoundError, ContextExceededError, KvBudgetExceededError, KvBlocksBusyError or
        QueueFullError.
        """
        model = self._models.get(demand.model)
        if model is None:
            raise _no_such_model(demand.model, self._models)
        self._check_ever_fits(demand, model)
        desk = self._desks.setdefault(demand.model, _Desk())
        ticket = Ticket(demand, on_decided, self._match(demand, model)[1])
        if len(desk.running) < model.info.slots and not desk.waiting:
            ticket.lease = self._admit(demand, model)
        elif len(desk.waiting) < self.queue_limit:
            desk.waiting.append(ticket)
        else:
            raise _queue_full(model, len(desk.waiting), self.queue_limit)
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """Take a request out of its queue, or its lease back. No-op when it was refused."""
        if ticket.lease is not None:
            self.release(ticket.lease)
            self.admit_waiting(ticket.demand.model)
        elif ticket.refusal is None:
            self._desks[ticket.demand.model].waiting.remove(ticket)

    def adopt(self, lease: Lease, demand: Demand) -> bool:
        """Let a request use the lease that was reserved for it; tell whether it is enough.

        If it is not, the caller gives the lease back, as when ContextExceededError or
        KvBudgetExceededError is raised: the request can never be served.
        """
        model = self._models.get(demand.model)
        if model is None:
            return False
        self._check_ever_fits(demand, model)
        if self._required(demand, model) > lease.blocks:
            return False
        if self._is_new(demand, lease, model) and not self._match_anew(lease, demand, model):
            return False
        lease.generation = model.generation
        lease.demand = demand
        cached_tokens = lease.predicted_cached_tokens
        lease.pending_prefill_tokens = max(0, demand.prompt_tokens(model) - cached_tokens)
        return True

    def release(self, lease: Lease) -> None:
        """Give back slot, blocks and claim.

        Whoever waits is let in by `admit_waiting` alone, so that what the request left in the
        cache can be remembered first. Raises RuntimeError for a lease that was given back before.
        """
        if lease.released:
            raise RuntimeError("a lease was given back twice")
        lease.released = True
        self._desks[lease.demand.model].running.remove(lease)
        self._pool.deactivate(lease.blocks)
        self._unclaim(lease)

    def admit_waiting(self, name: str) -> None:
        """Let those in who wait for a model, as far as its slots go.

        Whoever leaves the queue is decided: what goes wrong with one is raised where that one
        waits, not here, where another's request is being ended.
        """
        desk, model = self._desks.get(name), self._models.get(name)
        while desk and model and desk.waiting and len(desk.running) < model.info.slots:
            ticket = desk.waiting.popleft()
            try:
                ticket.lease = self._admit(ticket.demand, model)
            except Exception as refusal:  # noqa: BLE001 - raised by whoever waits for the ticket
                ticket.refusal = refusal
            ticket.on_decided()

    def refuse_waiting(self, refusal: Callable[[], KvplaneError], name: str | None = None) -> None:
        """Refuse all who wait, or all who wait for one model."""
        for model, desk in self._desks.items():
            while name in (None, model) and desk.waiting:
                ticket = desk.waiting.popleft()
                ticket.refusal = refusal()
                ticket.on_decided()

    def work(self) -> list[Work]:
        """Return what each model is doing; those without work are left out."""
        return [
            Work(name, len(desk.running), len(desk.waiting), _pending_tokens(desk))
            for name, desk in sorted(self._desks.items())
            if desk.running or desk.waiting
        ]

    def _check_ever_fits(self, demand: Demand, model: ServedModel) -> None:
        least_tokens, context = demand.least_prompt_tokens, model.info.context_tokens
        if context is not None and least_tokens > context:
            raise _context_exceeded(demand.model, least_tokens, context)
        required, total = self._pool.required(demand.least_kv_bytes(model)), self._pool.total
        if total is not None and required > total:
            raise _budget_exceeded(required, total, self._pool.block_bytes)

    def _required(self, demand: Demand, model: ServedModel) -> int:
        required, total = self._pool.required(demand.kv_bytes(model)), self._pool.total
        # Only an estimate says that it needs more than there is: it may have all.
        return required if total is None else min(required, total)

    def _match(self, demand: Demand, model: ServedModel) -> tuple[Match | None, int]:
        found = self._residencies.match(demand.model, demand.chain) if demand.chain else None
        cached_tokens = found.tokens if found else 0
        return found, max(0, demand.prompt_tokens(model) - cached_tokens)

    def _admit(self, demand: Demand, model: ServedModel) -> Lease:
        match, pending_tokens = self._match(demand, model)
        claimed = match.residency if match and match.whole else None
        blocks = self._required(demand, model)
        if claimed:
            self._residencies.claim(claimed)
            blocks = max(blocks, claimed.blocks)
        if not self._pool.could_fit(blocks):
            if claimed:
                self._residencies.unclaim(claimed)
            raise self._blocks_busy(blocks, model)
        evicted_blocks = self._make_room(blocks)
        self._pool.activate(blocks)
        lease = Lease(demand, model.generation, blocks, evicted_blocks, match, pending_tokens)
        self._desks[demand.model].running.add(lease)
        return lease

    def _is_new(self, demand: Demand, lease: Lease, model: ServedModel) -> bool:
        """Tell whether the lease's match says nothing of this request, or of the cache now."""
        same = (demand.chain, model.generation) == (lease.demand.chain, lease.generation)
        gone = lease.match is not None and lease.match.residency not in self._residencies
        return not same or gone

    def _match_anew(self, lease: Lease, demand: Demand, model: ServedModel) -> bool:
        """Claim what `demand` continues, in place of what was claimed; False if it is too big."""
        self._let_go(lease)
        lease.match = None
        match, _ = self._match(demand, model)
        claimed = match.residency if match and match.whole else None
        enough = claimed is None or claimed.blocks <= lease.blocks
        if enough:
            lease.match = match
            if claimed:
                self._residencies.claim(claimed)
        self._residencies.fit()
        return enough

    def _unclaim(self, lease: Lease) -> None:
        self._let_go(lease)
        self._residencies.fit()

    def _let_go(self, lease: Lease) -> None:
        if lease.match and lease.match.whole:
            self._residencies.unclaim(lease.match.residency)

    def _make_room(self, blocks: int) -> int:
        evicted_blocks = 0
        while not self._pool.fits(blocks):
            oldest = self._residencies.evict_oldest()
            assert oldest is not None, "idle prompts hold less than they were counted for"
            evicted_blocks += oldest.blocks
        return evicted_blocks

    def _blocks_busy(self, required: int, model: ServedModel) -> KvBlocksBusyError:
        active, total = self._pool.active, self._pool.total
        return KvBlocksBusyError(
            f"the request needs {required} KV blocks and running requests hold {active} of "
            f"{total}; retry later or on another node",
            retry_after_ms=_retry_after_ms(model),
            measured=required,
            limit=max(0, (total or 0) - active),
            required_blocks=required,
            active_blocks=active,
            total_blocks=total,
        )


def _pending_tokens(desk: _Desk) -> int:
    running = sum(lease.pending_prefill_tokens for lease in desk.running)
    return running + sum(ticket.pending_prefill_tokens for ticket in desk.waiting)


def _retry_after_ms(model: ServedModel) -> int:
    service_ms = model.rates.service_ms
    return _RETRY_UNKNOWN_MS if service_ms is None else max(1, int(service_ms / model.info.slots))


def _no_such_model(name: str, models: ServedModels) -> ModelNotFoundError:
    known = ", ".join(models.names()) or "none"
    return ModelNotFoundError(
        f"no model {name!r} on this node; there are: {known}", model=name, models=known
    )


def _queue_full(model: ServedModel, queued: int, limit: int) -> QueueFullError:
    return QueueFullError(
        f"{model.info.name}: all {model.info.slots} slots are taken and {queued} requests wait, of "
        f"at most {limit}; retry later or on another node",
        retry_after_ms=_retry_after_ms(model),
        measured=queued,
        limit=limit,
    )


def _context_exceeded(name: str, tokens: int, context_tokens: int) -> ContextExceededError:
    return ContextExceededError(
        f"the prompt has at least {tokens} tokens and the context of {name} is {context_tokens}; "
        "shorten it or choose a model with a longer context",
        measured=tokens,
        limit=context_tokens,
        prompt_tokens=tokens,
        context_tokens=context_tokens,
    )


def _budget_exceeded(required: int, total: int, block_bytes: int) -> KvBudgetExceededError:
    return KvBudgetExceededError(
        f"the request needs at least {required} KV blocks of {block_bytes} bytes and the node has "
        f"{total} in all; shorten it, lower max_tokens or choose a node with a greater KV budget",
        measured=required,
        limit=total,
        required_blocks=required,
        total_blocks=total,
    )
