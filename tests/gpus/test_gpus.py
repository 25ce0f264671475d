"""Choosing who tells about the GPUs, and adding up what is told."""

import pytest

from kvplane.common.v1 import node_pb2
from kvplane_node_agent.gpu_search import find_gpus, read_gpu_memory
from kvplane_node_agent.gpus import FakeGpus, Gpu, NoGpus, first_readable, memory
from kvplane_node_agent.memory import Memory

NVML = node_pb2.Capacity.MEMORY_SOURCE_NVML
SMI = node_pb2.Capacity.MEMORY_SOURCE_NVIDIA_SMI
ONE = Gpu(0, "A", 100, 40, 60)


@pytest.mark.parametrize(
    ("first", "source"),
    [
        (FakeGpus([ONE]), NVML),
        (FakeGpus([Gpu(0, "shares its memory")]), NVML),
        (FakeGpus(error="no driver"), SMI),
        (FakeGpus(), SMI),
    ],
    ids=["it tells", "it tells of a GPU but no figures", "it fails", "it tells of none"],
)
async def test_the_first_who_tells_of_a_gpu_is_asked(first: FakeGpus, source: int) -> None:
    found = await first_readable((first, FakeGpus([ONE], source=SMI)))
    assert found.source == source


async def test_when_nobody_tells_the_reasons_are_kept() -> None:
    found = await first_readable((FakeGpus(error="no library"), FakeGpus()))
    assert isinstance(found, NoGpus)
    assert found.why == "no library; FakeGpus: no GPU"
    assert await found.read() == ()


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], Memory()),
        ([Gpu(0, "A")], Memory()),
        ([ONE], Memory(NVML, 100, 60)),
        ([ONE, Gpu(1, "B", 50, 0, 50)], Memory(NVML, 150, 110)),
        ([ONE, Gpu(1, "B")], Memory(NVML, 100, 60)),
        ([Gpu(0, "A", 100)], Memory(NVML, 100, None)),
    ],
    ids=["no GPU", "no figures", "one", "two", "one of two tells", "free is unknown"],
)
def test_memory_is_the_sum_of_what_is_known(gpus: list[Gpu], expected: Memory) -> None:
    assert memory(gpus, NVML) == expected


async def test_this_machine_can_be_asked_whatever_it_has() -> None:
    found = await find_gpus()
    told = await read_gpu_memory()
    assert isinstance(found, NoGpus) == (not await found.read())
    assert told.total_bytes is None or told.total_bytes > 0
