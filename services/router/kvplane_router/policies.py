"""The ways to choose among the nodes that can take a request. Each is a plain function.

Candidates come in the order of their ids, and there is at least one. `rotation` is a number that
grows by one with each decision; it alone tells apart those between which nothing else decides.
"""

from collections.abc import Callable, Mapping, Sequence

from kvplane_router.costs import Candidate

Policy = Callable[[Sequence[Candidate], int], Candidate]

NEAR_MS = 5.0
NEAR_SHARE = 0.05
"""Costs so close to the lowest (whichever is more) are estimates of the same."""


def ttft(candidates: Sequence[Candidate], rotation: int) -> Candidate:
    """Choose the soonest first token.

    What is cached counts by the time it saves, so that it never overrides load. Among near-equals
    goes first the node where the conversation is, since a second copy of it would only take another
    prompt's place, then the one with the fewest requests in flight, whose decode the prefill
    would slow down, and then the best fit.
    """
    lowest_ms = min(candidate.total_ms for candidate in candidates)
    limit_ms = lowest_ms + max(NEAR_MS, NEAR_SHARE * lowest_ms)
    near = [candidate for candidate in candidates if candidate.total_ms <= limit_ms]
    near = [candidate for candidate in near if candidate.cached.continues] or near
    return _turn(_best_fit(_least(near, lambda candidate: candidate.in_flight)), rotation)


def ladder(candidates: Sequence[Candidate], rotation: int) -> Candidate:
    """Choose session over exact over prefix over best fit, whatever the load."""
    rungs: tuple[Callable[[Candidate], bool], ...] = (
        lambda candidate: candidate.cached.session,
        lambda candidate: candidate.cached.whole,
        lambda candidate: candidate.cached.tokens > 0,
    )
    reached = (list(filter(rung, candidates)) for rung in rungs)
    best = next(filter(None, reached), list(candidates))
    best = _least(best, lambda candidate: -candidate.cached.tokens)
    return _turn(_best_fit(best), rotation)


POLICIES: Mapping[str, Policy] = {"ttft": ttft, "ladder": ladder}


def _least(
    candidates: Sequence[Candidate], figure: Callable[[Candidate], float]
) -> list[Candidate]:
    least = min(map(figure, candidates))
    return [candidate for candidate in candidates if figure(candidate) == least]


def _best_fit(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Keep the nodes with the fewest free blocks left, where any node counts its blocks."""
    counted = [candidate for candidate in candidates if candidate.blocks]
    if not counted:
        return candidates
    return _least(counted, lambda candidate: candidate.blocks.free_after if candidate.blocks else 0)


def _turn(candidates: Sequence[Candidate], rotation: int) -> Candidate:
    return candidates[rotation % len(candidates)]
