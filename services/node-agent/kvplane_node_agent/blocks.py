"""The pool of KV blocks: what running requests hold, what idle prompts hold, and what is free."""

import math


class BlockPool:
    """Counts blocks of one size. Invariants: no count is negative; used == active + resident.

    `total` is None while nobody knows the KV budget: then everything fits, and slots alone decide.
    A pool may come to hold more than `total` only by a `resize` to less.
    """

    def __init__(self, block_bytes: int, total: int | None) -> None:
        assert block_bytes > 0
        self.block_bytes = block_bytes
        self.total = total
        self.active = 0
        self.resident = 0

    @property
    def free(self) -> int | None:
        """Blocks that nothing holds, or None for a pool of unknown size."""
        return None if self.total is None else max(0, self.total - self.active - self.resident)

    def required(self, kv_bytes: float | None) -> int:
        """Return the blocks that `kv_bytes` take, at least 1; 0 when they are unknown."""
        return 0 if kv_bytes is None else max(1, math.ceil(kv_bytes / self.block_bytes))

    def fits(self, blocks: int) -> bool:
        """Tell whether `blocks` more would fit now."""
        return blocks == 0 or self.free is None or blocks <= self.free

    def could_fit(self, blocks: int) -> bool:
        """Tell whether `blocks` more would fit if every idle prompt were evicted."""
        return blocks == 0 or self.total is None or self.active + blocks <= self.total

    def over(self) -> bool:
        """Tell whether more is held than there is, after a `resize`."""
        return self.total is not None and self.active + self.resident > self.total

    def activate(self, blocks: int) -> None:
        """Give `blocks` to a running request."""
        self.active += blocks
        self._check()

    def deactivate(self, blocks: int) -> None:
        """Take `blocks` back from a running request."""
        self.active -= blocks
        self._check()

    def settle(self, blocks: int) -> None:
        """Give `blocks` to an idle prompt."""
        self.resident += blocks
        self._check()

    def unsettle(self, blocks: int) -> None:
        """Take `blocks` back from an idle prompt."""
        self.resident -= blocks
        self._check()

    def resize(self, total: int | None) -> None:
        """Set the size; None when it is unknown."""
        self.total = total
        self._check()

    def _check(self) -> None:
        assert self.active >= 0, f"{self.active} active blocks"
        assert self.resident >= 0, f"{self.resident} resident blocks"
        assert self.total is None or self.total >= 0, f"{self.total} blocks in all"


def total_blocks(kv_budget_bytes: int | None, block_bytes: int) -> int | None:
    """Return how many whole blocks a budget holds, or None for an unknown budget."""
    return None if kv_budget_bytes is None else kv_budget_bytes // block_bytes
