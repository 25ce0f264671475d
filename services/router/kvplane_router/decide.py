"""The decision: weighs every node for a request, and names the one that wins and why."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kvplane_common.chains import Chain
from kvplane_common.errors import KvplaneError
from kvplane_common.requests import DEFAULT_BYTES_PER_TOKEN, least_tokens
from kvplane_router.costs import (
    Cached,
    Candidate,
    Need,
    Rates,
    Residents,
    typical_rates,
    weigh,
)
from kvplane_router.fleet import Fleet, Node
from kvplane_router.index import Home, Match, PrefixIndex
from kvplane_router.overtaken import Overtaken
from kvplane_router.policies import POLICIES
from kvplane_router.refusals import case, exclusion, refusal
from kvplane_router.reservations import Reservations
from kvplane_router.sessions import Session


class Stage(Enum):
    """The rungs of the ladder, and the two ways out under pressure, named as on the wire."""

    SESSION = auto()
    EXACT = auto()
    PREFIX = auto()
    MISS = auto()
    EVICT = auto()
    REJECT = auto()


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, as far as the choice of a node goes."""

    request_id: str
    tenant: str
    model: str
    chain: Chain
    session_id: str = ""
    """Empty: it belongs to no conversation."""
    answer_tokens: int | None = None
    """The most that the caller wants. None: it sets no limit."""
    deadline_ms: float | None = None
    """On the router's monotonic clock. None: there is none."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How to choose."""

    policy: str = "ttft"
    min_match_tokens: int = 64
    """A beginning under this length, shared with other prompts, counts as not cached."""


@dataclass(frozen=True, slots=True)
class View:
    """What the router knows at one moment."""

    fleet: Fleet
    index: PrefixIndex
    reservations: Reservations
    overtaken: Overtaken = field(default_factory=Overtaken)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen and why: a chosen candidate, or a refusal."""

    request_id: str
    stage: Stage
    policy: str
    prompt_tokens: int
    attempts: int
    candidates: tuple[Candidate, ...]
    """Every node that was weighed, best first."""
    chosen: Candidate | None = None
    refusal: KvplaneError | None = None


def decide(
    view: View,
    request: Request,
    session: Session | None,
    tried: Mapping[str, KvplaneError],
    rules: Rules,
    rotation: int,
    now_ms: float,
) -> Decision:
    """Choose a node for `request` among those not in `tried`, or refuse it."""
    need = estimate(view.fleet, request)
    typical = typical_rates(view.fleet, request.model)
    left_ms = None if request.deadline_ms is None else request.deadline_ms - now_ms
    facts = case(view.fleet, request.model, need, tried, typical, left_ms)
    candidates = [
        replace(candidate, excluded=exclusion(facts, candidate))
        for candidate in _weighed(view, request, session, need, typical, rules, now_ms)
    ]
    able = _trusted(view.fleet, [one for one in candidates if one.excluded is None], now_ms)
    chosen = POLICIES[rules.policy](able, rotation) if able else None
    return Decision(
        request_id=request.request_id,
        stage=_stage(chosen) if chosen else Stage.REJECT,
        policy=rules.policy,
        prompt_tokens=need.prompt_tokens,
        attempts=len(tried) + 1 if chosen else len(tried),
        candidates=tuple(sorted(candidates, key=lambda one: _place(one, chosen))),
        chosen=chosen,
        refusal=None if chosen else refusal(facts, view.fleet, candidates),
    )


def estimate(fleet: Fleet, request: Request) -> Need:
    """Return the tokens that a request takes, from its bytes and what the engines have counted."""
    length_bytes = request.chain.length_bytes
    prompt_tokens = math.ceil(length_bytes / bytes_per_token(fleet, request.model))
    return Need(prompt_tokens, request.answer_tokens, least_tokens(length_bytes))


def bytes_per_token(fleet: Fleet, model: str) -> float:
    """Return the canonical bytes that a token of `model` covers, or the default until learned."""
    learned = fleet.median_of(model, lambda found: found.bytes_per_token)
    return learned or DEFAULT_BYTES_PER_TOKEN


def _weighed(
    view: View,
    request: Request,
    session: Session | None,
    need: Need,
    typical: Rates,
    rules: Rules,
    now_ms: float,
) -> Iterator[Candidate]:
    matches = view.index.match(request.chain)
    per_token = bytes_per_token(view.fleet, request.model)
    for node in view.fleet.alive():
        model = node.models.get(request.model)
        local = view.reservations.in_flight(node.node_id, request.model)
        if model is None:
            yield Candidate(node, local.requests)
            continue
        home = node.home(request.model)
        match = matches.get(home) if home else None
        cached = _cached(match, need, per_token, rules.min_match_tokens)
        is_session = cached.tokens > 0 and _is_here(session, node, request)
        cached = replace(cached, session=is_session)
        residents = _residents(view.index, home, per_token)
        idler, model = view.overtaken.discounted(node, model)
        yield weigh(idler, model, need, cached, residents, local, typical, now_ms)


def _cached(match: Match | None, need: Need, per_token: float, min_match_tokens: int) -> Cached:
    if match is None:
        return Cached()
    tokens = need.prompt_tokens if match.whole else math.floor(match.shared_bytes / per_token)
    # A short beginning in common is scaffolding; a short prompt that is there as a whole, or goes
    # on where a cached one ends, is not.
    if not (match.whole or match.continues) and tokens < min_match_tokens:
        return Cached()
    # The engine always evaluates the last token.
    tokens = max(0, min(tokens, need.prompt_tokens - 1))
    return Cached(tokens, match.whole, match.continues)


def _is_here(session: Session | None, node: Node, request: Request) -> bool:
    return (
        session is not None
        and session.model == request.model
        and session.is_on(node, request.chain)
    )


def _residents(index: PrefixIndex, home: Home | None, per_token: float) -> Residents:
    coldest = index.coldest(home) if home else None
    if home is None or coldest is None:
        return Residents()
    tokens = coldest.tokens or math.ceil(coldest.chain.length_bytes / per_token)
    return Residents(index.residents(home), tokens)


def _trusted(fleet: Fleet, able: Sequence[Candidate], now_ms: float) -> Sequence[Candidate]:
    """Leave out the suspects, unless there is nobody else."""
    trusted = [one for one in able if not fleet.is_suspect(one.node.node_id, now_ms)]
    return trusted or able


def _stage(chosen: Candidate) -> Stage:
    if chosen.cached.session:
        return Stage.SESSION
    if chosen.cached.whole:
        return Stage.EXACT
    if chosen.cached.tokens:
        return Stage.PREFIX
    return Stage.EVICT if chosen.evicted_blocks else Stage.MISS


def _place(candidate: Candidate, chosen: Candidate | None) -> tuple[bool, bool, float]:
    return candidate is not chosen, candidate.excluded is not None, candidate.total_ms
