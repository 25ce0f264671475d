"""NVML, by a library that answers as drivers have been seen to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from kvplane_node_agent.gpus import Gpu, GpusUnreadableError
from kvplane_node_agent.nvml import NvmlGpus


def library(memory: Callable[[], Any], init_error: int | None = None, gpus: int = 1) -> Any:
    """Return a library with the real one's errors."""
    calls: list[str] = []

    def init() -> None:
        if init_error is not None:
            raise pynvml.NVMLError(init_error)
        calls.append("init")

    return SimpleNamespace(
        calls=calls,
        nvmlInit=init,
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: memory(),
        **{name: value for name, value in vars(pynvml).items() if name.startswith("NVMLError")},
    )


def failing(code: int) -> Callable[[], Any]:
    def ask() -> Any:
        raise pynvml.NVMLError(code)

    return ask


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (lambda: SimpleNamespace(total=100, used=40, free=60), Gpu(0, "GPU 0", 100, 40, 60)),
        (lambda: SimpleNamespace(total=0, used=0, free=0), Gpu(0, "GPU 0")),
        (failing(pynvml.NVML_ERROR_NOT_SUPPORTED), Gpu(0, "GPU 0")),
        (failing(pynvml.NVML_ERROR_NO_PERMISSION), Gpu(0, "GPU 0")),
        (failing(pynvml.NVML_ERROR_UNKNOWN), Gpu(0, "GPU 0")),
    ],
    ids=["figures", "zeros", "not supported", "no permission", "unknown error"],
)
async def test_what_a_gpu_does_not_tell_is_unknown(
    memory: Callable[[], Any], expected: Gpu
) -> None:
    nvml = library(memory)
    assert list(await NvmlGpus(nvml).read()) == [expected]
    assert nvml.calls == ["init", "shutdown"]


async def test_every_gpu_is_told() -> None:
    nvml = library(lambda: SimpleNamespace(total=100, used=40, free=60), gpus=3)
    assert [gpu.index for gpu in await NvmlGpus(nvml).read()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "Not Found"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version"),
    ],
    ids=["no library", "no driver", "driver of another version"],
)
async def test_without_library_or_driver_it_says_why(code: int, says: str) -> None:
    with pytest.raises(GpusUnreadableError, match=f"NVML: .*(?i:{says})"):
        await NvmlGpus(library(failing(0), init_error=code)).read()


async def test_a_gpu_that_fell_off_the_bus_is_a_failure_and_the_library_is_closed() -> None:
    nvml = library(failing(pynvml.NVML_ERROR_GPU_IS_LOST))
    with pytest.raises(GpusUnreadableError):
        await NvmlGpus(nvml).read()
    assert nvml.calls == ["init", "shutdown"]
