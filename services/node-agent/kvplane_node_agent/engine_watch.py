"""Watches the engine: what it serves, when it goes, and when it comes back."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from kvplane_common.errors import KvplaneError
from kvplane_node_agent.engines.base import Engine
from kvplane_node_agent.memory import Memory, ReadMemory
from kvplane_node_agent.node import Node

POLL_S = 1.0
_AGAIN_S = 0.1
_MISSES = 2
"""Polls in a row that must fail before the engine counts as gone: one may be a busy machine."""

_log = structlog.get_logger(__name__)


class EngineWatch:
    """Finds the engine, polls it about every second, and tells the node."""

    def __init__(
        self,
        node: Node,
        find: Callable[[], Awaitable[Engine]],
        read_memory: ReadMemory,
        poll_s: float = POLL_S,
    ) -> None:
        self._node = node
        self._find = find
        self._read_memory = read_memory
        self._poll_s = poll_s
        self._name = ""
        self._memory = Memory()
        self._misses = 0
        self._retired: list[Engine] = []

    async def run(self) -> None:
        """Watch until cancelled, and close the engine then."""
        try:
            while True:
                self._node.look_now.clear()
                try:
                    await self._look()
                    self._misses = 0
                except KvplaneError as error:
                    self._miss(str(error))
                except Exception as error:  # noqa: BLE001 - a foreign program must not end this one
                    _log.warning("the engine's answer broke the agent's reading", exc_info=error)
                    self._miss(repr(error))
                await self._close_retired()
                await self._pause()
        finally:
            self._retire()
            for engine in self._retired:
                await engine.close()

    async def _look(self) -> None:
        node = self._node
        if node.engine is None:
            node.engine = await self._find()
        if not node.ledger.engine_present:
            self._name = await node.engine.describe()
            self._memory = await self._read_memory()
        node.engine_seen(self._name, await node.engine.models(), self._memory)

    def _miss(self, why: str) -> None:
        self._misses += 1
        if self._node.ledger.engine_present and self._misses >= _MISSES:
            self._node.engine_lost(why)
        elif not self._node.ledger.engine_present and self._misses == 1:
            _log.warning("waiting for the engine", why=why)
        if not self._node.ledger.engine_present:
            # What comes back may be another engine.
            self._retire()

    def _retire(self) -> None:
        if self._node.engine is not None:
            self._retired.append(self._node.engine)
            self._node.engine = None

    async def _close_retired(self) -> None:
        # An engine that was only slow may still be in the middle of an answer.
        if not any(work.active for work in self._node.ledger.admission.work()):
            while self._retired:
                await self._retired.pop().close()

    async def _pause(self) -> None:
        doubtful = self._misses and self._node.ledger.engine_present
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S if doubtful else self._poll_s):
                await self._node.look_now.wait()
