"""What a request would cost on a node: the expected time to its first token, part by part.

    total = load + slot wait + prefill + eviction                            (milliseconds)

    load       the time to load the weights, unless they are loaded
    slot wait  ceil((in flight - slots + 1) / slots) x service time, once every slot is taken; the
               first of these turns takes no less than every running answer has taken already
    prefill    (uncached tokens that wait there + those of this request) / prefill rate
    eviction   tokens of the prompt that would be pushed out / prefill rate x its chance to return

A figure that the node has not measured is the median of the nodes that have, else a default.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from kvplane_common.errors import KvplaneError
from kvplane_router.fleet import Fleet, Model, Node
from kvplane_router.reservations import InFlight

# Used only until a model's first request anywhere has ended. They are those of a small model on a
# modest GPU: too slow rather than too fast, so that a node that has measured itself is preferred.
DEFAULT_PREFILL_TOKENS_PER_S = 500.0
DEFAULT_LOAD_MS = 10_000.0
DEFAULT_SERVICE_MS = 5_000.0

RETURN_CHANCE = 0.3
"""How likely the coldest prompt of a node is to be asked for again. Public traces reuse 36 to 62 %
of their tokens; the prompt that was left alone longest returns less often than the average one."""

ASSUMED_ANSWER_TOKENS = 256
"""The answer's length when the caller sets no limit."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs anywhere."""

    prompt_tokens: int
    """Estimated from its bytes."""
    answer_tokens: int | None = None
    """The most that the caller wants. None: it sets no limit."""
    least_prompt_tokens: int = 0
    """The prompt has no fewer, however wrong the estimate is."""

    @property
    def tokens(self) -> int:
        """Prompt and answer, as far as anybody can tell."""
        answer_tokens = self.answer_tokens
        return self.prompt_tokens + (
            ASSUMED_ANSWER_TOKENS if answer_tokens is None else answer_tokens
        )

    @property
    def least_tokens(self) -> int:
        """Prompt and answer, for sure."""
        return self.least_prompt_tokens + (self.answer_tokens or 0)


@dataclass(frozen=True, slots=True)
class Cached:
    """What one node is believed to have of the prompt already."""

    tokens: int = 0
    """0 also for a match too short to count."""
    whole: bool = False
    continues: bool = False
    """It would go on where a cached prompt ends, and push out no other."""
    session: bool = False
    """The conversation's last turn ran there."""


@dataclass(frozen=True, slots=True)
class Residents:
    """The cached prompts of one node and model."""

    count: int = 0
    coldest_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Blocks:
    """KV blocks of a request on a node."""

    required: int
    """All that it needs, those of its cached tokens included. More than the node has in all only
    where that is beyond doubt."""
    active: int
    """Held there by running requests."""
    evicted: int
    """Blocks of idle prompts that must go for it."""
    free_after: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Figures of a model on a node."""

    prefill_tokens_per_s: float
    load_ms: float
    service_ms: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node, weighed."""

    node: Node
    in_flight: int
    """Requests that run or wait there."""
    cached: Cached = Cached()
    blocks: Blocks | None = None
    """None when the node does not count blocks."""
    load_ms: float = 0.0
    slot_wait_ms: float = 0.0
    prefill_ms: float = 0.0
    eviction_ms: float = 0.0
    uncached_tokens: int = 0
    measured: bool = False
    """Every figure in the cost is the node's own."""
    excluded: KvplaneError | None = None
    """Why it is out of the question."""

    @property
    def total_ms(self) -> float:
        """Expected time to first token."""
        return self.load_ms + self.slot_wait_ms + self.prefill_ms + self.eviction_ms

    @property
    def evicted_blocks(self) -> int:
        """Blocks of idle prompts that must go for it; 0 where blocks are not counted."""
        return self.blocks.evicted if self.blocks else 0


def typical_rates(fleet: Fleet, model: str) -> Rates:
    """Return what to assume of a node that has not measured itself."""

    def typical(name: str, default: float) -> float:
        figure: Callable[[Model], float | None] = attrgetter(name)
        known = fleet.median_of(model, figure)
        return default if known is None else known

    return Rates(
        typical("prefill_tokens_per_s", DEFAULT_PREFILL_TOKENS_PER_S),
        typical("load_ms", DEFAULT_LOAD_MS),
        typical("service_ms", DEFAULT_SERVICE_MS),
    )


def weigh(
    node: Node,
    model: Model,
    need: Need,
    cached: Cached,
    residents: Residents,
    local: InFlight,
    typical: Rates,
    now_ms: float,
) -> Candidate:
    """Return the node with each part of its cost.

    `local` is what this router knows to be in flight there. Against what the node last reported,
    the greater of each counts: both see a part, and neither sees more than there is.
    """
    own = _own(model, typical)
    in_flight = max(local.requests, model.in_flight)
    pending_tokens = max(local.uncached_tokens, model.pending_tokens)
    # The engine always evaluates the last token, however much is cached.
    uncached_tokens = max(1, need.prompt_tokens - cached.tokens)
    blocks = count_blocks(node, model, need, cached, local)
    pushes_out = _pushes_out(model, cached, residents, blocks)
    pushed_tokens = residents.coldest_tokens if pushes_out else 0
    per_token_ms = 1000 / own.prefill_tokens_per_s
    return Candidate(
        node=node,
        in_flight=in_flight,
        cached=cached,
        blocks=blocks,
        load_ms=0.0 if model.loaded else own.load_ms,
        slot_wait_ms=_slot_wait_ms(model, in_flight, local, own.service_ms, now_ms),
        prefill_ms=(pending_tokens + uncached_tokens) * per_token_ms,
        eviction_ms=pushed_tokens * per_token_ms * RETURN_CHANCE,
        uncached_tokens=uncached_tokens,
        measured=_is_measured(model, in_flight),
    )


def count_blocks(
    node: Node, model: Model, need: Need, cached: Cached, local: InFlight
) -> Blocks | None:
    """Return the blocks that the request needs there, or None when the node does not count them.

    It takes over those of a cached prompt that it continues. Where it branches off it shares
    tokens, but needs blocks of its own.
    """
    if node.total_blocks is None or not node.block_bytes or model.kv_bytes_per_token is None:
        return None
    per_token = model.kv_bytes_per_token / node.block_bytes

    def blocks_of(tokens: int) -> int:
        most = tokens if model.context_tokens is None else min(tokens, model.context_tokens)
        return max(1, math.ceil(most * per_token))

    # An estimate that is over all that there is may be wrong: only the engine can tell.
    required = max(blocks_of(need.least_tokens), min(blocks_of(need.tokens), node.total_blocks))
    taken_over = math.floor(cached.tokens * per_token) if cached.continues else 0
    active = max(local.blocks, node.active_blocks)
    idle = max(0, node.resident_blocks - taken_over)
    room = node.total_blocks - active - idle - required
    return Blocks(required, active, evicted=min(idle, max(0, -room)), free_after=max(0, room))


def _own(model: Model, typical: Rates) -> Rates:
    return Rates(
        model.prefill_tokens_per_s or typical.prefill_tokens_per_s,
        typical.load_ms if model.load_ms is None else model.load_ms,
        typical.service_ms if model.service_ms is None else model.service_ms,
    )


def _slot_wait_ms(
    model: Model, in_flight: int, local: InFlight, service_ms: float, now_ms: float
) -> float:
    turns = _turns(in_flight, model.slots)
    if not turns:
        return 0.0
    # Few answers are long, but one that has run for long is likely to go on for as long again.
    since_ms = local.answering_since_ms
    shortest_ms = now_ms - max(since_ms) if len(since_ms) >= model.slots else 0.0
    return max(service_ms, shortest_ms) + (turns - 1) * service_ms


def _turns(in_flight: int, slots: int) -> int:
    """Return how many requests must end, one after the other, before a slot is free."""
    return max(0, math.ceil((in_flight - slots + 1) / slots))


def _pushes_out(model: Model, cached: Cached, residents: Residents, blocks: Blocks | None) -> bool:
    short_of_blocks = blocks is not None and blocks.evicted > 0
    short_of_slots = residents.count >= model.slots and not cached.continues
    return short_of_blocks or short_of_slots


def _is_measured(model: Model, in_flight: int) -> bool:
    return (
        model.prefill_tokens_per_s is not None
        and (model.loaded or model.load_ms is not None)
        and (in_flight < model.slots or model.service_ms is not None)
    )
