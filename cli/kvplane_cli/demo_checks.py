"""What must hold after the demo, and what it measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane_cli.asking import Answer

MIN_REUSED = 0.8
"""Least share of the earlier prompt that a later turn must find in the cache."""
MAX_UNCACHED_TOKENS = 8
"""Most tokens of an exact repeat that may be evaluated; engines always evaluate one."""
MIN_SPEEDUP = 5.0
"""Least ratio of cold to warm time to first token."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the demo and its answer."""

    what: str
    answer: Answer

    def to_json(self) -> Mapping[str, Any]:
        """Return it as a JSON object."""
        return {"what": self.what, **self.answer.to_json()}


@dataclass(frozen=True, slots=True)
class Report:
    """What the demo measured."""

    turns: Sequence[Turn]
    """The first user's conversation."""
    again: Turn
    """The first turn's prompt again, outside the session."""
    other_user: Turn
    unrelated: Turn
    after_restart: Turn
    keys_before: frozenset[bytes]
    """The metastore's cache and session keys before it was killed."""
    keys_after: frozenset[bytes]

    @property
    def all_turns(self) -> Sequence[Turn]:
        """Every request, in the order of asking."""
        return (*self.turns, self.again, self.other_user, self.unrelated, self.after_restart)

    @property
    def speedup(self) -> float | None:
        """Cold over warm time to first token on the same prompt; None where one is unknown."""
        cold_ms, warm_ms = self.turns[0].answer.ttft_ms, self.again.answer.ttft_ms
        return cold_ms / warm_ms if cold_ms and warm_ms else None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str
    """What was found, for the case that it does not hold."""


def checks(report: Report) -> Iterator[Check]:
    """Yield everything that must hold."""
    first = report.turns[0].answer
    for before, turn in zip(report.turns, report.turns[1:], strict=False):
        yield from _continued(turn, before.answer, first)
    again = report.again.answer
    yield _stage(report.again, "EXACT")
    uncached = _uncached(again)
    yield Check(
        f"{report.again.what}: at most {MAX_UNCACHED_TOKENS} tokens were evaluated",
        uncached is not None and uncached <= MAX_UNCACHED_TOKENS,
        f"{uncached} of {again.prompt_tokens}",
    )
    yield _stage(report.other_user, "PREFIX")
    yield Check(
        f"warm TTFT is at least {MIN_SPEEDUP:g}x lower than cold on the same prompt",
        report.speedup is not None and report.speedup >= MIN_SPEEDUP,
        f"{report.speedup}",
    )
    lost = report.keys_before - report.keys_after
    yield Check(
        "cache and session entries outlive a SIGKILL of the metastore",
        bool(report.keys_before) and not lost,
        f"{len(lost)} of {len(report.keys_before)} lost",
    )
    yield Check(
        f"{report.after_restart.what}: it was answered",
        bool(report.after_restart.answer.text),
        "no text",
    )


def _continued(turn: Turn, before: Answer, first: Answer) -> Iterator[Check]:
    node = turn.answer.decision.node_id
    yield _stage(turn, "SESSION")
    yield Check(f"{turn.what}: on the first turn's node", node == first.decision.node_id, node)
    cached, earlier = turn.answer.cached_tokens, before.prompt_tokens
    yield Check(
        f"{turn.what}: over {MIN_REUSED:.0%} of the prompt before it was cached",
        cached is not None and earlier is not None and cached > MIN_REUSED * earlier,
        f"{cached} of {earlier}",
    )


def _stage(turn: Turn, expected: str) -> Check:
    return Check(f"{turn.what}: stage {expected}", turn.answer.stage == expected, turn.answer.stage)


def _uncached(answer: Answer) -> int | None:
    if answer.prompt_tokens is None or answer.cached_tokens is None:
        return None
    return answer.prompt_tokens - answer.cached_tokens
