"""A whole cluster on this machine, each service a process of its own."""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from kvplane_cli.layout import Addresses, Engine, Ports
from kvplane_cli.plan import Planned, plan
from kvplane_cli.processes import Child, is_serving
from kvplane_cli.shell import CliError

START_S = 60.0
"""Longest wait for one service; a second or two on a machine that is not busy."""
STOP_S = 15.0
"""Longest wait for one service's graceful stop, in seconds."""


class LocalCluster:
    """A cluster that runs while the `async with` block does.

    Node `node-1` stands in front of the first of `engines`, and so on. Logs go to `run_dir`, one
    file a process; the metastore's data to `data_dir`. `flags` adds flags by process name:
    "metastore", "registry", "router", "node-1" and so on, "engine-1" and so on.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        run_dir: Path,
        *,
        ports: Ports | None = None,
        data_dir: Path | None = None,
        policy: str = "ttft",
        flags: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        ports = ports or Ports.free(len(engines))
        self.addresses = Addresses.of(ports)
        waves = plan(engines, ports, data_dir or run_dir / "data", policy)
        flags = flags or {}
        self._waves = [
            [_child(planned, run_dir, flags.get(planned.name, ())) for planned in wave]
            for wave in waves
        ]

    @property
    def children(self) -> Sequence[Child]:
        """Every process, in the order of starting."""
        return [child for wave in self._waves for child in wave]

    def child(self, name: str) -> Child:
        """Return one process. Raises KeyError for a name that is not there."""
        return {child.name: child for child in self.children}[name]

    async def start(self) -> None:
        """Start every process and wait until all serve. Raises CliError, with a log's end."""
        for wave in self._waves:
            for child in wave:
                await child.start()
            for child in wave:
                await child.wait_ready(START_S)

    async def stop(self) -> None:
        """End every process with SIGTERM, the last started first."""
        for child in reversed(self.children):
            await child.stop(STOP_S)

    def kill_all(self) -> None:
        """Send every process a SIGKILL, without waiting for its end."""
        for child in self.children:
            child.send_kill()

    async def kill(self, name: str) -> None:
        """End one process with SIGKILL. Raises KeyError for a name that is not there."""
        await self.child(name).kill()

    async def restart(self, name: str) -> None:
        """Start a process that has ended again, on its old address, and wait until it serves."""
        await self.child(name).start()
        await self.child(name).wait_ready(START_S)

    async def first_death(self) -> CliError:
        """Wait until a process ends by itself; return an error that names it and shows its log."""
        waits = {asyncio.create_task(child.ended()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        return await waits[done.pop()].failure("ended unexpectedly")

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()


def _child(planned: Planned, run_dir: Path, flags: Sequence[str]) -> Child:
    async def is_ready(child: Child) -> bool:
        if planned.address is None:
            return "READY " in await child.output()
        return await is_serving(planned.address)

    log = run_dir / f"{planned.name}.log"
    return Child(planned.name, (*planned.command, *flags), log, is_ready)


@contextmanager
def run_directory(given: Path | None) -> Iterator[Path]:
    """Give a directory for logs and data: `given`, or one that is removed at the end.

    A CliError from the block tells where the logs are, if they stay.
    """
    if given is None:
        with tempfile.TemporaryDirectory(prefix="kvplane-") as made:
            yield Path(made)
        return
    given.mkdir(parents=True, exist_ok=True)
    try:
        yield given
    except CliError as error:
        raise CliError(f"{error}\nThe logs are in {given}.") from error
