"""How much memory the engine's node has, and who says so."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvplane.common.v1 import node_pb2


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all GPUs together. None is what nobody could tell."""

    source: "node_pb2.Capacity.MemorySource.ValueType" = node_pb2.Capacity.MEMORY_SOURCE_UNSPECIFIED
    total_bytes: int | None = None
    free_bytes: int | None = None


ReadMemory = Callable[[], Awaitable[Memory]]
"""Reads the memory now; never fails, but may know nothing."""


def operators_memory(memory_mb: int | None) -> Memory:
    """Return what the operator says, in MiB; all of it counts as free."""
    if memory_mb is None:
        return Memory()
    bytes_ = memory_mb * 1024 * 1024
    return Memory(node_pb2.Capacity.MEMORY_SOURCE_OPERATOR, bytes_, bytes_)
