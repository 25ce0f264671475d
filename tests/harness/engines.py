"""Real engines for tests: llama.cpp's own HTTP server as a child process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

_START_S = 60.0
"""Longest start that a test waits for; a fifth of a second on a machine that is not busy."""


class EngineProcess:
    """An engine that runs while the `async with` block does.

    `context_tokens` are those of all slots together. With `cache_ram_mb=0` a prompt that leaves
    its slot is forgotten; otherwise the engine keeps it in host memory.
    """

    def __init__(
        self,
        model: Path,
        *,
        slots: int = 1,
        context_tokens: int = 4096,
        cache_ram_mb: int = 8192,
        threads: int = 1,
        alias: str = "",
        api_key: str = "",
    ) -> None:
        self.name = alias or model.stem.partition("-")[0]
        self.url = ""
        self._api_key = api_key
        self._process: asyncio.subprocess.Process | None = None
        self._options: Mapping[str, object] = {
            "model": model,
            "slots": slots,
            "context": context_tokens,
            "cache-ram-mb": cache_ram_mb,
            "threads": threads,
            "alias": self.name,
            "api-key": api_key,
        }

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._running.pid

    async def start(self) -> None:
        """Start it, on the port it had before if it ran already, and wait until it is healthy."""
        port = self.url.rpartition(":")[2] or "0"
        flags = [f"--{name}={value}" for name, value in self._options.items()]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvplane_cli.embedded_engine", f"--port={port}",
            f"--parent={os.getpid()}", *flags,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        line = await asyncio.wait_for(self._stdout().readline(), _START_S)
        if not line.startswith(b"READY "):
            raise RuntimeError(f"the engine ended with status {await self._process.wait()}")
        self.url = line.split()[1].decode()
        await wait_for(self._healthy, _START_S)

    async def stop(self) -> None:
        """End it with SIGTERM."""
        await self._end(asyncio.subprocess.Process.terminate)

    async def kill(self) -> None:
        """End it with SIGKILL, in the midst of whatever it does."""
        await self._end(asyncio.subprocess.Process.kill)

    async def restart(self) -> None:
        """Stop it if it runs, and start it again on the same port with an empty cache."""
        await self.stop()
        await self.start()

    async def slots(self) -> list[dict[str, Any]]:
        """Return what the engine says of its slots."""
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        async with _get(f"{self.url}/slots", headers) as response:
            slots: list[dict[str, Any]] = await response.json()
            return slots

    async def busy_slots(self) -> int:
        """Return how many slots work on a request."""
        return sum(slot["is_processing"] for slot in await self.slots())

    async def idle(self, seconds: float = 10.0) -> None:
        """Wait until no slot works. Raises TimeoutError after `seconds`."""

        async def no_slot_works() -> bool:
            return await self.busy_slots() == 0

        await wait_for(no_slot_works, seconds)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the engine has not been started"
        return self._process

    def _stdout(self) -> asyncio.StreamReader:
        stdout = self._running.stdout
        assert stdout is not None
        return stdout

    async def _healthy(self) -> bool:
        async with _get(f"{self.url}/health") as response:
            return response.status == 200

    async def _end(self, signal: Callable[[asyncio.subprocess.Process], None]) -> None:
        if self._process is not None and self._process.returncode is None:
            signal(self._process)
            await self._process.wait()


@asynccontextmanager
async def _get(
    url: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        yield response


async def wait_for(condition: Callable[[], Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait until `condition` holds. Raises TimeoutError after `seconds`."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.01)
