"""What nvidia-smi has been seen to print."""

import asyncio
from pathlib import Path

import pytest

from kvplane_node_agent.gpus import Gpu, GpusUnreadableError
from kvplane_node_agent.nvidia_smi import NvidiaSmiGpus, parse

MIB = 1024 * 1024
HEADER = "index, name, memory.total [MiB], memory.used [MiB], memory.free [MiB]\n"
RTX = Gpu(0, "NVIDIA GeForce RTX 4090", 24564 * MIB, 512 * MIB, 24052 * MIB)
ORIN = Gpu(0, "Orin (nvgpu)")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param(
            HEADER + "0, NVIDIA GeForce RTX 4090, 24564 MiB, 512 MiB, 24052 MiB\n", [RTX],
            id="header and units",
        ),
        pytest.param("0, NVIDIA GeForce RTX 4090, 24564, 512, 24052\n", [RTX], id="bare figures"),
        pytest.param(
            HEADER + "0, NVIDIA GeForce RTX 4090, 24564, 512, 24052\n\n", [RTX],
            id="header without units in the rows",
        ),
        pytest.param(
            "0, A, 1024, 24, 1000\n1, B, 2048, 48, 2000\n",
            [Gpu(0, "A", 1024 * MIB, 24 * MIB, 1000 * MIB),
             Gpu(1, "B", 2048 * MIB, 48 * MIB, 2000 * MIB)],
            id="two GPUs",
        ),
        pytest.param(
            HEADER + "0, NVIDIA GB10, [N/A], [N/A], [N/A]\n", [Gpu(0, "NVIDIA GB10")],
            id="memory shared with the machine",
        ),
        pytest.param("0, Orin (nvgpu), [N/A], [N/A], [N/A]\n", [ORIN], id="Jetson"),
        pytest.param("0, Orin (nvgpu), 0, 0, 0\n", [ORIN], id="zeros are no figures"),
        pytest.param(
            HEADER + "0, NVIDIA A100-SXM4-80GB, [Insufficient Permissions], "
            "[Insufficient Permissions], [Insufficient Permissions]\n",
            [Gpu(0, "NVIDIA A100-SXM4-80GB")],
            id="a MIG parent in a pod without rights",
        ),
        pytest.param(
            "0, GeForce RTX 2080 Ti, 11264 MiB, [Unknown Error], 1560 MiB\n",
            [Gpu(0, "GeForce RTX 2080 Ti", 11264 * MIB, None, 1560 * MIB)],
            id="one figure unknown",
        ),
        pytest.param("0, Odd, 99999999999999 MiB, 1 MiB, 1 MiB\n", [Gpu(0, "Odd")], id="absurd"),
        pytest.param("0, Old, [Not Supported], N/A, ERR!\n", [Gpu(0, "Old")], id="older words"),
        pytest.param(
            '0, "Board, with a comma", 1024 MiB, 24 MiB, 1000 MiB\n',
            [Gpu(0, "Board, with a comma", 1024 * MIB, 24 * MIB, 1000 * MIB)],
            id="a comma in the name",
        ),
        pytest.param(
            "name, driver_version, temperature.gpu, memory.total [MiB], memory.free [MiB]\n"
            "NVIDIA A100, 535.161.08, 47, 81920 MiB, 80000 MiB\n",
            [Gpu(0, "NVIDIA A100", 81920 * MIB, None, 80000 * MIB)],
            id="other columns, by the header",
        ),
        pytest.param("WARNING: infoROM is corrupted\n0, A, 8, 2, 6\n",
                     [Gpu(0, "A", 8 * MIB, 2 * MIB, 6 * MIB)], id="a warning before the table"),
        pytest.param("No devices were found\n", [], id="no device"),
        pytest.param("", [], id="nothing"),
    ],
)  # fmt: skip
def test_it_understands(output: str, expected: list[Gpu]) -> None:
    assert parse(output) == expected


def test_columns_without_a_header_are_named_by_the_caller() -> None:
    row = "0, NVIDIA GeForce RTX 4090, GPU-abc, 00000000:01:00.0, 24564, 570.124.06, 450.00\n"
    columns = (
        "index",
        "name",
        "uuid",
        "pci.bus_id",
        "memory.total",
        "driver_version",
        "power.limit",
    )
    assert parse(row, columns) == [Gpu(0, "NVIDIA GeForce RTX 4090", 24564 * MIB)]


def program(folder: Path, script: str) -> str:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_it_asks_the_program_for_what_it_parses(tmp_path: Path) -> None:
    fields = "--query-gpu=index,name,memory.total,memory.used,memory.free --format=csv"
    script = f'[ "$*" = "{fields}" ] || exit 2\nprintf "0, A, 8 MiB, 2 MiB, 6 MiB\\n"'
    (gpu,) = await NvidiaSmiGpus(program(tmp_path, script)).read()
    assert gpu == Gpu(0, "A", 8 * MIB, 2 * MIB, 6 * MIB)


MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (f'echo "{MISMATCH}"; echo "NVML library version: 535.161"; exit 18', f"18.*{MISMATCH}"),
        ('echo "NVIDIA-SMI has failed because it couldn\'t communicate"; exit 9', "9.*has failed"),
        ("exit 4", "status 4 and said: nothing"),
    ],
    ids=["driver mismatch", "no driver", "silence"],
)
async def test_a_failure_says_what_the_program_said(tmp_path: Path, script: str, says: str) -> None:
    with pytest.raises(GpusUnreadableError, match=says):
        await NvidiaSmiGpus(program(tmp_path, script)).read()


async def test_a_missing_program_is_a_failure_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(GpusUnreadableError, match="No such file"):
        await NvidiaSmiGpus(str(tmp_path / "nvidia-smi")).read()


async def test_a_program_that_hangs_is_ended(tmp_path: Path) -> None:
    hanging = NvidiaSmiGpus(program(tmp_path, "exec sleep 60"), timeout_s=0.1)
    with pytest.raises(GpusUnreadableError, match="did not end within"):
        await asyncio.wait_for(hanging.read(), 10)
