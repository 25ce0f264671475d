"""GPUs by the nvidia-smi program, where NVIDIA's library cannot be loaded."""

import asyncio
import csv
import re
from collections.abc import Iterable, Mapping, Sequence

from kvplane.common.v1 import node_pb2
from kvplane_node_agent.gpus import Gpu, GpusUnreadableError, MemorySource

_COLUMNS = ("index", "name", "memory.total", "memory.used", "memory.free")
_TIMEOUT_S = 10.0
_UNIT_BYTES = {"": 1 << 20, "MiB": 1 << 20, "KiB": 1 << 10, "GiB": 1 << 30, "B": 1}
_FIGURE = re.compile(r"([0-9]{1,18})\s*([A-Za-z]*)")
_MOST_BYTES = 1 << 50
"""A thousand times the memory of any GPU there is: more is no figure."""


class NvidiaSmiGpus:
    """Runs the program each time."""

    source: MemorySource = node_pb2.Capacity.MEMORY_SOURCE_NVIDIA_SMI

    def __init__(self, program: str = "nvidia-smi", timeout_s: float = _TIMEOUT_S) -> None:
        self._program = program
        self._timeout_s = timeout_s

    async def read(self) -> Sequence[Gpu]:
        """Return the GPUs. Raises GpusUnreadableError with what the program said."""
        status, output = await self._run(f"--query-gpu={','.join(_COLUMNS)}", "--format=csv")
        if status != 0:
            # It explains itself on standard output, and its status is NVML's error number.
            says = " ".join(output.split()) or "nothing"
            raise GpusUnreadableError(
                f"{self._program} ended with status {status} and said: {says[:300]}"
            )
        try:
            return parse(output)
        except csv.Error as error:
            raise GpusUnreadableError(f"{self._program} printed no table: {error}") from error

    async def _run(self, *flags: str) -> tuple[int, str]:
        pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                self._program, *flags, stdin=none, stdout=pipe, stderr=asyncio.subprocess.STDOUT
            )
        except OSError as error:
            raise GpusUnreadableError(f"cannot run {self._program}: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await process.communicate()
        except TimeoutError as error:
            raise GpusUnreadableError(
                f"{self._program} did not end within {self._timeout_s:g} s"
            ) from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, output.decode("utf-8", "replace")


def parse(output: str, columns: Sequence[str] = _COLUMNS) -> list[Gpu]:
    """Return the GPUs in a csv answer of nvidia-smi, with or without header and units.

    Without a header the columns are `columns`. A figure that is not a number, such as "[N/A]", is
    None. Lines that are no row of the table are passed over.
    """
    gpus: list[Gpu] = []
    for row in csv.reader(output.splitlines(), skipinitialspace=True):
        cells = [cell.strip() for cell in row]
        if _is_header(cells):
            columns = [_column(cell) for cell in cells]
        elif len(cells) == len(columns):
            gpus.append(_gpu(dict(zip(columns, cells, strict=True)), len(gpus)))
    return gpus


def _is_header(cells: Iterable[str]) -> bool:
    return any(_column(cell) in ("name", "memory.total") for cell in cells)


def _column(cell: str) -> str:
    return cell.partition(" [")[0]


def _gpu(row: Mapping[str, str], position: int) -> Gpu:
    index = row.get("index", "")
    total = _bytes(row.get("memory.total", ""))
    return Gpu(
        index=int(index) if index.isdecimal() else position,
        name=row.get("name", "unknown"),
        memory_total_bytes=total or None,
        # Boards whose GPU shares the machine's memory may answer with zeros.
        memory_used_bytes=_bytes(row.get("memory.used", "")) if total else None,
        memory_free_bytes=_bytes(row.get("memory.free", "")) if total else None,
    )


def _bytes(cell: str) -> int | None:
    figure = _FIGURE.fullmatch(cell)
    if figure is None or figure[2] not in _UNIT_BYTES:
        return None
    size_bytes = int(figure[1]) * _UNIT_BYTES[figure[2]]
    return size_bytes if size_bytes <= _MOST_BYTES else None
