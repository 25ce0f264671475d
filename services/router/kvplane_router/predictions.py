"""Predicted against actual: notices a home that no longer has what it is believed to have."""

from collections.abc import Callable

from kvplane_router.index import Home

COLLAPSED_SHARE = 0.1
"""A measured hit under this share of the predicted one is a miss."""
MISSES_IN_A_ROW = 3
"""So many are no accident, such as one prompt that the engine evicted on its own."""


class Predictions:
    """Counts the misses in a row of each home; what is not measured says nothing."""

    def __init__(self) -> None:
        self._misses: dict[Home, int] = {}

    def collapsed(self, home: Home, predicted_tokens: int, measured_tokens: int) -> bool:
        """Note a request that was predicted a hit; tell whether it was one miss too many."""
        if not predicted_tokens:
            return False
        if measured_tokens >= COLLAPSED_SHARE * predicted_tokens:
            self._misses.pop(home, None)
            return False
        misses = self._misses.pop(home, 0) + 1
        if misses < MISSES_IN_A_ROW:
            self._misses[home] = misses
        return misses >= MISSES_IN_A_ROW

    def drop(self, dead: Callable[[Home], bool]) -> None:
        """Forget every home that is `dead`."""
        self._misses = {home: count for home, count in self._misses.items() if not dead(home)}
