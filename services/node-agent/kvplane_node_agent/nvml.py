"""GPUs by NVIDIA's management library, the interface that NVIDIA keeps compatible."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from kvplane.common.v1 import node_pb2
from kvplane_node_agent.gpus import Gpu, GpusUnreadableError, MemorySource


class NvmlGpus:
    """Asks the library anew each time, so that a driver that comes or goes is noticed."""

    source: MemorySource = node_pb2.Capacity.MEMORY_SOURCE_NVML

    def __init__(self, library: Any = pynvml) -> None:
        self._library = library

    async def read(self) -> Sequence[Gpu]:
        """Return the GPUs. Raises GpusUnreadableError if there is no library or no driver."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Sequence[Gpu]:
        nvml = self._library
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise GpusUnreadableError(f"NVML: {error}") from error
        try:
            return [self._gpu(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise GpusUnreadableError(f"NVML: {error}") from error
        finally:
            nvml.nvmlShutdown()

    def _gpu(self, index: int) -> Gpu:
        nvml = self._library
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = self._told(lambda: str(nvml.nvmlDeviceGetName(handle)))
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        # Boards whose GPU shares the machine's memory may answer with zeros.
        if memory is None or memory.total <= 0:
            return Gpu(index, name or "unknown")
        return Gpu(index, name or "unknown", memory.total, memory.used, memory.free)

    def _told(self, ask: Callable[[], Any]) -> Any:
        """Return what `ask` does, or None for what this GPU does not support or may not tell."""
        nvml = self._library
        try:
            return ask()
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_Unknown):
            return None
