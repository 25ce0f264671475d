"""A clock that moves only when a test says so."""


class ManualClock:
    """Starts at a fixed moment; both clocks move together."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = float(now_ms)

    def now_ms(self) -> int:
        return int(self._now_ms)

    def monotonic_ms(self) -> float:
        return self._now_ms

    def advance_ms(self, ms: float) -> None:
        self._now_ms += ms
