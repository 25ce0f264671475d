"""Writes the node's cached prompts to the metastore, behind the requests."""

from collections.abc import Iterable
from typing import Protocol

from kvplane_common.keys import cache_key, cache_prefix
from kvplane_node_agent.report import residency_of
from kvplane_node_agent.residency import Residency


class Writes(Protocol):
    """Takes changes, to write them soon and in order."""

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key`."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove `key`."""
        ...

    def delete_prefix(self, prefix: bytes) -> None:
        """Remove every key that begins with `prefix`, but not what is put after this call."""
        ...


class Records:
    """The journal of residencies that keeps the records under /cache/<node_id>/.

    They are this agent's to write while the registry grants it the node id. Without a grant they
    may be another's, and nothing is written.
    """

    def __init__(self, node_id: str, writes: Writes) -> None:
        self._node_id = node_id
        self._writes = writes
        self._granted_epoch: int | None = None

    def grant(self, epoch: int, residencies: Iterable[Residency]) -> None:
        """Note that the node id is this agent's in `epoch`, and replace what others left.

        No-op for a grant that is held already.
        """
        if epoch == self._granted_epoch:
            return
        self._granted_epoch = epoch
        self.clear()
        for residency in residencies:
            self.put(residency)

    def revoke(self) -> None:
        """Note that the node id is, or may be, another agent's."""
        self._granted_epoch = None

    def put(self, residency: Residency) -> None:
        """Write the record of a cached prompt soon."""
        if self._granted_epoch is not None:
            record = residency_of(residency, self._node_id)
            self._writes.put(self._key(residency), record.SerializeToString())

    def delete(self, residency: Residency) -> None:
        """Remove the record of a prompt that is cached no more soon."""
        if self._granted_epoch is not None:
            self._writes.delete(self._key(residency))

    def clear(self) -> None:
        """Remove every record of the node: they speak of an earlier epoch."""
        if self._granted_epoch is not None:
            self._writes.delete_prefix(cache_prefix(self._node_id))

    def _key(self, residency: Residency) -> bytes:
        return cache_key(self._node_id, residency.model, residency.chain.last)
