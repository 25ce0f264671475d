"""What an engine says that it measured."""

from typing import Any

_MOST_COUNT = 2**30
"""So that the sum of three still fits where tokens are told in 32 bits."""
_MOST_DURATION = 1e18
"""Thirty years in nanoseconds."""


class Figures:
    """The numbers of one JSON object. What is missing or makes no sense is None: unknown.

    An odd number must not spoil an answer that is whole.
    """

    def __init__(self, told: object) -> None:
        """Take `told`, of whatever type; one that is no object tells nothing."""
        self._told: dict[str, Any] = told if isinstance(told, dict) else {}

    def count(self, name: str) -> int | None:
        """Return a number of tokens or the like."""
        value = self._told.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return value if 0 <= value <= _MOST_COUNT else None

    def duration(self, name: str) -> float | None:
        """Return a duration, in whatever unit the engine gives it."""
        value = self._told.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if 0 <= value <= _MOST_DURATION else None
