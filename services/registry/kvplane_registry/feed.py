"""Tells every watcher of the nodes what changed, and never waits for a slow one."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane_common.errors import UnavailableError


class Pending:
    """What one watcher has not been told: at most one entry a node, however slow it is."""

    def __init__(self) -> None:
        self._changes: dict[str, node_pb2.Node | None] = {}

    def add(self, node_id: str, node: node_pb2.Node | None) -> None:
        """Remember a node's newest state; None where it was removed."""
        self._changes[node_id] = node

    def take(self) -> registry_pb2.WatchNodesResponse:
        """Return all of it as one step, and begin anew."""
        changes, self._changes = self._changes, {}
        return registry_pb2.WatchNodesResponse(
            nodes=[node for node in changes.values() if node is not None],
            removed_node_ids=[node_id for node_id, node in changes.items() if node is None],
        )

    def __bool__(self) -> bool:
        return bool(self._changes)


class Feed:
    """The open watches."""

    def __init__(self) -> None:
        self._watchers: dict[Pending, asyncio.Event] = {}
        self._closed = False

    @property
    def watchers(self) -> int:
        """How many watches are open."""
        return len(self._watchers)

    def publish(self, node_id: str, node: node_pb2.Node | None) -> None:
        """Tell every watcher that a node changed, or with None that it was removed."""
        for pending, wake in self._watchers.items():
            pending.add(node_id, node)
            wake.set()

    def close(self) -> None:
        """End every watch, now and in future."""
        self._closed = True
        for wake in self._watchers.values():
            wake.set()

    async def follow(
        self, nodes: Callable[[], list[node_pb2.Node]]
    ) -> AsyncGenerator[registry_pb2.WatchNodesResponse, None]:
        """Yield a reset step with all `nodes` there are, then every change.

        Raises UnavailableError once the feed is closed.
        """
        pending, wake = Pending(), asyncio.Event()
        self._watchers[pending] = wake
        try:
            yield registry_pb2.WatchNodesResponse(reset=True, nodes=nodes())
            while not self._closed:
                await wake.wait()
                wake.clear()
                if pending:
                    yield pending.take()
        finally:
            del self._watchers[pending]
        raise UnavailableError("the registry is stopping; watch again", retry_after_ms=500)
