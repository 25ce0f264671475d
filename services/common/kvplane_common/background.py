"""Owned background tasks, and pauses between attempts."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `coroutines` beside the block, and cancel and await them at its end.

    One that fails is logged when it does: such a task is expected to run until it is cancelled.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(_tell)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _tell(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("background task failed", task=task.get_name(), exc_info=task.exception())


def pauses_s(first_s: float = 0.1, most_s: float = 2.0) -> Iterator[float]:
    """Yield the seconds to wait before each next attempt, doubling from `first_s` to `most_s`."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, most_s)
