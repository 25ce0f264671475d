"""How long an answer may keep its slot while its engine says nothing."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

GONE_S = 5.0
"""Longest silence of an engine that counts as gone, in seconds."""

_T = TypeVar("_T")


class Patience:
    """Waits without end for an engine that is there: a long prefill may be silent.

    For one that counts as gone, `gone_s` seconds.
    """

    def __init__(self, gone_s: float = GONE_S) -> None:
        self._gone_s = gone_s
        self._gone = False
        self._waits: set[asyncio.Timeout] = set()

    async def wait_for(self, said: Awaitable[_T]) -> _T:
        """Return what the engine says next. Raises TimeoutError, and cancels `said` then."""
        async with asyncio.timeout_at(self._end()) as wait:
            self._waits.add(wait)
            try:
                return await said
            finally:
                self._waits.remove(wait)

    def lose(self) -> None:
        """Note that the engine counts as gone."""
        self._gone = True
        self._reschedule()

    def regain(self) -> None:
        """Note that the engine is there."""
        self._gone = False
        self._reschedule()

    def _end(self) -> float | None:
        return asyncio.get_running_loop().time() + self._gone_s if self._gone else None

    def _reschedule(self) -> None:
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(self._end())
