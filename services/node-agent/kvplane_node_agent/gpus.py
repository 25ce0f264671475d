"""The GPUs of this machine, as far as somebody can tell."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvplane.common.v1 import node_pb2
from kvplane_node_agent.memory import Memory

MemorySource: TypeAlias = "node_pb2.Capacity.MemorySource.ValueType"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. A figure that cannot be read is None, never 0."""

    index: int
    name: str
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None


class GpusUnreadableError(Exception):
    """The GPUs cannot be asked; the message says why. They may be there and work all the same."""


class Gpus(Protocol):
    """Somebody who can tell about the GPUs."""

    @property
    def source(self) -> MemorySource:
        """Who it is."""
        ...

    async def read(self) -> Sequence[Gpu]:
        """Return the GPUs as they are now. Raises GpusUnreadableError."""
        ...


class FakeGpus:
    """GPUs as a test wants them: one with an error set cannot be read."""

    def __init__(
        self,
        gpus: Iterable[Gpu] = (),
        *,
        source: MemorySource = node_pb2.Capacity.MEMORY_SOURCE_NVML,
        error: str = "",
    ) -> None:
        self.gpus = list(gpus)
        self.source = source
        self.error = error

    async def read(self) -> Sequence[Gpu]:
        """Return the GPUs, or raise GpusUnreadableError with the error."""
        if self.error:
            raise GpusUnreadableError(self.error)
        return tuple(self.gpus)


class NoGpus:
    """What stands in where nobody can tell; `why` says what was tried."""

    source: MemorySource = node_pb2.Capacity.MEMORY_SOURCE_UNSPECIFIED

    def __init__(self, why: str) -> None:
        self.why = why

    async def read(self) -> Sequence[Gpu]:
        """Return none."""
        return ()


async def first_readable(candidates: Iterable[Gpus]) -> Gpus:
    """Return the first that tells of a GPU, or NoGpus with every reason why none does."""
    reasons = []
    for candidate in candidates:
        try:
            if await candidate.read():
                return candidate
            reasons.append(f"{type(candidate).__name__}: no GPU")
        except GpusUnreadableError as error:
            reasons.append(str(error))
    return NoGpus("; ".join(reasons))


def memory(gpus: Sequence[Gpu], source: MemorySource) -> Memory:
    """Return the memory of the GPUs that tell theirs, together; unknown if none does."""
    total = _sum(gpu.memory_total_bytes for gpu in gpus)
    free = _sum(gpu.memory_free_bytes for gpu in gpus)
    known = total is not None or free is not None
    return Memory(source, total, free) if known else Memory()


def _sum(figures: Iterable[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None
