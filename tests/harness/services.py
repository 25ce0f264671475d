"""Services of the cluster for tests: in this process, or as processes of their own."""

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Generic, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvplane_common.channels import dial
from kvplane_common.config import ServiceConfig

START_S = 20.0
"""Longest that a test waits for a service, on a busy machine."""

Config = TypeVar("Config", bound=ServiceConfig)


def free_address() -> str:
    """Return a loopback address whose port is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


async def until(holds: Callable[[], Awaitable[bool]], limit_s: float = START_S) -> None:
    """Wait until a condition holds. Raises TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not await holds():  # noqa: ASYNC110 - another process tells no event
            await asyncio.sleep(0.01)


async def health(address: str, service: str = "") -> str:
    """Return what the health service says, such as "SERVING", or "AWAY" where nobody answers."""
    async with dial(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=START_S)
        except grpc.aio.AioRpcError:
            return "AWAY"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


class InProcess(Generic[Config]):
    """A service in this process, which can stop and start again on its address."""

    def __init__(
        self, serve: Callable[[Config, asyncio.Event], Awaitable[None]], config: Config
    ) -> None:
        self.address = config.listen
        self._serve = serve
        self._config = config
        self._stop = asyncio.Event()
        self._task: asyncio.Future[None] | None = None

    async def start(self, health_is: str = "SERVING") -> None:
        """Start it and wait for its health."""
        self._stop = asyncio.Event()
        self._task = asyncio.ensure_future(self._serve(self._config, self._stop))
        await until(lambda: self._is(health_is))

    async def stop(self) -> None:
        """Stop it gracefully, if it runs."""
        task, self._task = self._task, None
        self._stop.set()
        if task is not None:
            await task

    async def _is(self, wanted: str) -> bool:
        if self._task is not None and self._task.done():
            await self._task
            raise RuntimeError("the service ended")
        return await health(self.address) == wanted

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()


class OwnProcess:
    """A service as `python -m module`, which can be ended and started again."""

    def __init__(self, module: str, address: str, *arguments: str) -> None:
        self.address = address
        self._command = (sys.executable, "-m", module, "--listen", address, *arguments)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, health_is: str = "SERVING") -> None:
        """Start it and wait for its health."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stderr=asyncio.subprocess.DEVNULL
        )
        await self.until_health_is(health_is)

    async def until_health_is(self, wanted: str) -> None:
        """Wait for its health. Raises RuntimeError if it ends meanwhile."""
        await until(lambda: self._is(wanted))

    async def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit status: negative where the signal killed it."""
        assert self._process is not None
        self._process.send_signal(number)
        status = await asyncio.wait_for(self._process.wait(), START_S)
        self._process = None
        return status

    async def _is(self, wanted: str) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            raise RuntimeError(f"the service ended with status {self._process.returncode}")
        return await health(self.address) == wanted

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.end(signal.SIGKILL)
