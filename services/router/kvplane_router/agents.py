"""Calls to the node agents."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvplane.agent.v1 import agent_pb2, agent_pb2_grpc
from kvplane_common.channels import dial
from kvplane_common.errors import NodeUnreachableError, UnavailableError, from_rpc

_LATE = grpc.StatusCode.DEADLINE_EXCEEDED

RESERVE_S = 10.0
RELEASE_S = 5.0
"""How long a node may take for what it answers from memory."""


@dataclass(slots=True)
class _Line:
    channel: grpc.aio.Channel
    calls: int = 0
    broken: bool = False


class Agents:
    """A channel for each address, opened at the first call there.

    Every call raises the agent's own errors, and NodeUnreachableError where it cannot be called.
    """

    def __init__(self, *, reserve_s: float = RESERVE_S, release_s: float = RELEASE_S) -> None:
        self._lines: dict[str, _Line] = {}
        self._reserve_s = reserve_s
        self._release_s = release_s

    async def generate(
        self, address: str, request: agent_pb2.GenerateRequest
    ) -> AsyncGenerator[agent_pb2.GenerateResponse, None]:
        """Run a prompt. Closing the generator, or cancelling who awaits it, stops the engine."""
        async with self._calling(address) as stub:
            call = stub.Generate(request)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

    async def reserve(
        self, address: str, request: agent_pb2.ReserveRequest
    ) -> agent_pb2.ReserveResponse:
        """Hold capacity."""
        async with self._calling(address) as stub:
            return await stub.Reserve(request, timeout=self._reserve_s)

    async def release(self, address: str, reservation_id: str) -> None:
        """Give a reservation back."""
        async with self._calling(address) as stub:
            request = agent_pb2.ReleaseRequest(reservation_id=reservation_id)
            await stub.Release(request, timeout=self._release_s)

    async def keep(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses, save those with a call that still runs."""
        gone = [
            address
            for address, line in self._lines.items()
            if address not in addresses and not line.calls
        ]
        for address in gone:
            await self._lines.pop(address).channel.close()

    async def aclose(self) -> None:
        """Close every channel, and with it every call."""
        while self._lines:
            _, line = self._lines.popitem()
            await line.channel.close()

    @asynccontextmanager
    async def _calling(self, address: str) -> AsyncIterator[agent_pb2_grpc.AgentServiceStub]:
        line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(dial(address))
        line.calls += 1
        try:
            yield agent_pb2_grpc.AgentServiceStub(line.channel)
        except grpc.aio.AioRpcError as error:
            known = from_rpc(error)
            if type(known) is not UnavailableError and error.code() is not _LATE:
                raise known from error
            self._give_up(address, line)
            raise NodeUnreachableError(
                f"the router cannot call the node agent at {address} ({known}); look at its "
                "--listen and --advertise, and at what stands between",
                address=address,
            ) from error
        finally:
            line.calls -= 1
            if line.broken and not line.calls:
                await line.channel.close()

    def _give_up(self, address: str, line: _Line) -> None:
        # A channel that failed to connect pauses for up to a second, and fails every call
        # meanwhile: also one to an agent that is known to be back.
        line.broken = True
        if self._lines.get(address) is line:
            del self._lines[address]
