"""A sign of life on stderr while something takes long; only for a person at a terminal."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_QUIET_S = 1.0
"""How long a step may take before it is worth a line."""


class Progress:
    """A spinner that appears once a step has taken a second."""

    def __init__(self, console: Console, text: str) -> None:
        self._status = console.status(text)
        loop = asyncio.get_running_loop()
        self._begin = loop.call_later(_QUIET_S, self._status.start) if console.is_terminal else None

    def say(self, text: str) -> None:
        """Name the step that goes on now."""
        self._status.update(text)

    def stop(self) -> None:
        """Take the spinner away. Harmless when it never came or is gone."""
        if self._begin is not None:
            self._begin.cancel()
            self._status.stop()


@contextmanager
def progress(console: Console, text: str) -> Iterator[Progress]:
    """Show `text` on `console` for as long as the block runs beyond a second."""
    shown = Progress(console, text)
    try:
        yield shown
    finally:
        shown.stop()
