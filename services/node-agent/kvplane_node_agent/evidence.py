"""What the engine's numbers say about its cache."""

from dataclasses import dataclass
from enum import Enum

from kvplane.common.v1 import generation_pb2
from kvplane_node_agent.engines.base import Finished

LOADED_MS = 1000.0
"""A load that took longer was a real one: the cache was empty, whatever was believed."""

_CONFIRMS = 0.9
_SLACK_TOKENS = 2
"""An engine always evaluates a token again, and may lose one where texts are joined."""
_PARTLY_CONDEMNS = 0.5
"""How many tokens a part of a prompt has is only estimated: a few missing prove nothing."""


def was_cold(finished: Finished) -> bool:
    """Tell whether the engine loaded the weights for this request."""
    return finished.load_ms is not None and finished.load_ms > LOADED_MS


def usage_of(finished: Finished, prefill_tokens_per_s: float | None) -> generation_pb2.Usage:
    """Return the tokens of a request, and how its cached ones are known.

    The rate must come from requests whose uncached tokens were known. What nobody can tell is
    absent.
    """
    usage = generation_pb2.Usage(
        prompt_tokens=finished.prompt_tokens,
        cached_tokens=finished.cached_tokens,
        completion_tokens=finished.completion_tokens,
    )
    if finished.cached_tokens is not None:
        usage.evidence = generation_pb2.EVIDENCE_MEASURED
    elif (cached_tokens := _inferred(finished, prefill_tokens_per_s)) is not None:
        usage.cached_tokens = cached_tokens
        usage.evidence = generation_pb2.EVIDENCE_INFERRED
    return usage


def _inferred(finished: Finished, prefill_tokens_per_s: float | None) -> int | None:
    if finished.prompt_tokens is None:
        return None
    if was_cold(finished):
        return 0
    if finished.prefill_ms is None or prefill_tokens_per_s is None:
        return None
    uncached_tokens = round(finished.prefill_ms * prefill_tokens_per_s / 1000)
    return min(max(finished.prompt_tokens - uncached_tokens, 0), finished.prompt_tokens)


class Verdict(Enum):
    """What a request's cached tokens say about the cached prompt that was expected to serve it."""

    UNKNOWN = "unknown"
    """Nothing: the belief stays as it was."""
    CONFIRMED = "confirmed"
    SHRUNK = "shrunk"
    """Only a part of what was expected is there."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, and the tokens that were proven to be cached."""

    verdict: Verdict
    proven_tokens: int = 0


def judge(predicted_tokens: int, usage: generation_pb2.Usage, *, whole: bool) -> Judgement:
    """Compare a prediction with what came out. An inferred count can confirm but never condemn.

    `whole` tells that the request began with the whole of the cached prompt, whose tokens the
    engine once counted.
    """
    if predicted_tokens <= 0 or not usage.HasField("cached_tokens"):
        return Judgement(Verdict.UNKNOWN)
    cached_tokens = usage.cached_tokens
    enough = min(_CONFIRMS * predicted_tokens, predicted_tokens - _SLACK_TOKENS)
    if cached_tokens > 0 and cached_tokens >= enough:
        return Judgement(Verdict.CONFIRMED, cached_tokens)
    if usage.evidence != generation_pb2.EVIDENCE_MEASURED:
        return Judgement(Verdict.UNKNOWN)
    if cached_tokens == 0:
        return Judgement(Verdict.GONE)
    if not whole and cached_tokens >= _PARTLY_CONDEMNS * predicted_tokens:
        return Judgement(Verdict.UNKNOWN)
    return Judgement(Verdict.SHRUNK, cached_tokens)
