"""One process of a local cluster: started, waited for, watched, stopped; its output in a file."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane_cli.shell import CliError
from kvplane_common.channels import dial

_POLL_S = 0.05
_TAIL_LINES = 15
_NOT_YET = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Child:
    """A Python module run as a process that ends with this one.

    `is_ready` tells whether it can serve; what it writes is appended to `log`, restarts included.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        is_ready: Callable[["Child"], Awaitable[bool]],
    ) -> None:
        self.name = name
        self.log = log
        self.command = tuple(command)
        self._is_ready = is_ready
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Its process id. Raises CliError before the first start."""
        if self._process is None:
            raise CliError(f"{self.name} has not been started")
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the process lives."""
        return self._process is not None and self._process.returncode is None

    @property
    def status(self) -> int | None:
        """Its exit status, negative where a signal killed it; None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start the process; `wait_ready` tells when it serves."""
        log = await asyncio.to_thread(self.log.open, "ab")
        self._log_start = log.tell()
        try:
            # A session of its own: Ctrl-C reaches only this process, which stops them in order.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvplane_cli.bound", str(os.getpid()), *self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            log.close()

    async def wait_ready(self, limit_s: float) -> None:
        """Return once it can serve. Raises CliError, with the log's end, if it does not."""
        try:
            async with asyncio.timeout(limit_s):
                while not await self._is_ready(self):
                    if not self.running:
                        raise await self.failure("ended before it could serve")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise await self.failure(f"could not serve within {limit_s:g} s") from None

    async def ended(self) -> None:
        """Return when the process has ended."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self, limit_s: float) -> None:
        """End it with SIGTERM, and with SIGKILL where that takes over `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """End it with SIGKILL, in the midst of whatever it does."""
        await self._end(signal.SIGKILL)

    def send_kill(self) -> None:
        """Send it SIGKILL, if it runs; `ended` tells when it has ended."""
        if self._process is not None and self.running:
            self._process.kill()

    async def output(self) -> str:
        """Return what it has written since its last start."""
        written = await asyncio.to_thread(self.log.read_bytes)
        return written[self._log_start :].decode(errors="replace")

    async def failure(self, what: str) -> CliError:
        """Return an error that says what happened and shows the end of its log."""
        lines = (await self.output()).splitlines()[-_TAIL_LINES:]
        shown = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        return CliError(f"{self.name} {what}. The end of its log:\n{shown}")

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(number)
            await self._process.wait()


async def is_serving(address: str) -> bool:
    """Tell whether the gRPC service at `address` says that it can serve."""
    async with dial(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=1.0
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_YET:
                return False
            raise
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
