"""Requests that flow while a test does something to the cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.clusters import Asking, fresh
from harness.services import until


class Flow:
    """Lanes of short requests, one after the other in each."""

    def __init__(self, asking: Asking) -> None:
        self.answered = 0
        self.failures: list[BaseException] = []
        self._asking = asking
        self._stopping = False

    async def until_answered(self, more: int) -> None:
        """Wait until that many more requests were answered."""
        wanted = self.answered + more

        async def holds() -> bool:
            return self.answered >= wanted or bool(self.failures)

        await until(holds)

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopping = True

    async def lane(self) -> None:
        """Ask until stopped, or until one fails."""
        while not self._stopping and not self.failures:
            try:
                answer = await self._asking.ask(fresh(40))
                assert answer.text
            except Exception as error:  # noqa: BLE001 - told by the end of the block
                self.failures.append(error)
            else:
                self.answered += 1


@asynccontextmanager
async def flowing(asking: Asking, lanes: int = 2) -> AsyncIterator[Flow]:
    """Let requests flow while the block runs, and check at its end that none failed."""
    flow = Flow(asking)
    running = [asyncio.create_task(flow.lane()) for _ in range(lanes)]
    try:
        yield flow
        await flow.until_answered(2 * lanes)
    finally:
        flow.stop()
        await asyncio.gather(*running)
    assert flow.failures == []
