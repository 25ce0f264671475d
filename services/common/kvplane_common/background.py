"""Owned background tasks, and pauses between attempts."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

_CANCELLED = RuntimeError("it was cancelled, and not by its owner")

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `coroutines` beside the block, and cancel and await them at its end.

    One that fails is logged and ends the block with a RuntimeError: a service that has lost a part
    of itself must not look alive. One may end well before the block does.
    """
    owner, failed = asyncio.current_task(), list[BaseException]()

    def note(task: "asyncio.Task[None]") -> None:
        # A call that gRPC cancels by itself ends a task as cancelled, though nobody asked for it.
        error = _CANCELLED if task.cancelled() else task.exception()
        if error is not None:
            _log.error("background task failed", task=task.get_name(), exc_info=error)
            failed.append(error)
            if owner is not None:
                owner.cancel()

    tasks = [
        asyncio.create_task(one, name=getattr(one, "__qualname__", None)) for one in coroutines
    ]
    for task in tasks:
        task.add_done_callback(note)
    try:
        yield
    except asyncio.CancelledError:
        if not failed:
            raise
        raise RuntimeError("a background task failed") from failed[0]
    finally:
        for task in tasks:
            task.remove_done_callback(note)
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception) and ended not in failed:
                _log.error("background task failed at its end", exc_info=ended)


def pauses_s(first_s: float = 0.1, most_s: float = 2.0) -> Iterator[float]:
    """Yield the seconds to wait before each next attempt, doubling from `first_s` to `most_s`."""
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, most_s)
