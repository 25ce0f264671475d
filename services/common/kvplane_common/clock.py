"""The time, passed in wherever something is decided by it."""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since 1970; for records that others read."""
        ...

    def monotonic_ms(self) -> float:
        """Return a clock in milliseconds that never goes back; for leases and durations."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now_ms(self) -> int:
        """Return the wall clock in milliseconds since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> float:
        """Return the machine's monotonic clock in milliseconds."""
        return time.monotonic_ns() / 1e6
