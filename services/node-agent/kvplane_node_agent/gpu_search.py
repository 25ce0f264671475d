"""Who on this machine can tell about its GPUs."""

import structlog

from kvplane_node_agent.gpus import Gpus, GpusUnreadableError, NoGpus, first_readable, memory
from kvplane_node_agent.memory import Memory
from kvplane_node_agent.nvidia_smi import NvidiaSmiGpus
from kvplane_node_agent.nvml import NvmlGpus

_log = structlog.get_logger(__name__)


async def find_gpus() -> Gpus:
    """Return NVML if it tells of a GPU, else nvidia-smi, else NoGpus. Never fails."""
    return await first_readable((NvmlGpus(), NvidiaSmiGpus()))


async def read_gpu_memory() -> Memory:
    """Return the memory of this machine's GPUs together, and who told; unknown if nobody can."""
    gpus = await find_gpus()
    if isinstance(gpus, NoGpus):
        _log.info("no GPU can be read", why=gpus.why)
        return Memory()
    try:
        return memory(await gpus.read(), gpus.source)
    except GpusUnreadableError as error:
        _log.warning("the GPUs can no longer be read", why=str(error))
        return Memory()
