"""Node agents that do what a test says: refuse, fail, stall. A real engine does not on command."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvplane.agent.v1 import agent_pb2, agent_pb2_grpc
from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import UnsupportedError
from kvplane_common.interceptor import Context
from kvplane_common.serving import serving

NAME = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name

Step = str | Exception | grpc.StatusCode
"""A text to send as a delta, STALL, END (a clean end without completion), an error to raise, or a
bare status to end with."""

STALL = "\x00stall"
END = "\x00end"


class ScriptedAgent(agent_pb2_grpc.AgentServiceServicer):
    """Runs its `script` for each call, then completes; remembers what it was asked."""

    def __init__(self, *script: Step, prompt_tokens: int = 100, cached_tokens: int = 0) -> None:
        self.script: tuple[Step, ...] = script or ("Hello", " there")
        self.usage = generation_pb2.Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=2,
            evidence=generation_pb2.EVIDENCE_MEASURED,
        )
        self.address = ""
        self.asked: list[agent_pb2.GenerateRequest] = []
        self.reserved: list[agent_pb2.ReserveRequest] = []
        self.released: list[str] = []
        self.stalled = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def Generate(
        self, request: agent_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[agent_pb2.GenerateResponse]:
        self.asked.append(request)
        for step in self.script:
            if isinstance(step, str) and step not in (STALL, END):
                if step == self.script[0]:
                    yield agent_pb2.GenerateResponse(admission=agent_pb2.Admission(blocks=1))
                yield agent_pb2.GenerateResponse(delta=generation_pb2.Delta(text=step))
            elif step == STALL:
                await self._stall()
            elif step == END:
                return
            elif isinstance(step, grpc.StatusCode):
                await context.abort(step, "scripted")
            elif isinstance(step, Exception):
                raise step
        completion = generation_pb2.Completion(usage=self.usage)
        yield agent_pb2.GenerateResponse(completion=completion)

    async def Reserve(
        self, request: agent_pb2.ReserveRequest, context: Context
    ) -> agent_pb2.ReserveResponse:
        self.reserved.append(request)
        if isinstance(self.script[0], Exception):
            raise self.script[0]
        response = agent_pb2.ReserveResponse(reservation_id=f"held-{len(self.reserved)}")
        response.expire_time.GetCurrentTime()
        response.expire_time.seconds += 60
        return response

    async def Release(
        self, request: agent_pb2.ReleaseRequest, context: Context
    ) -> agent_pb2.ReleaseResponse:
        self.released.append(request.reservation_id)
        return agent_pb2.ReleaseResponse()

    async def Forward(
        self, request: agent_pb2.ForwardRequest, context: Context
    ) -> AsyncIterator[agent_pb2.ForwardResponse]:
        yield agent_pb2.ForwardResponse()

    async def FetchKv(
        self, request: agent_pb2.FetchKvRequest, context: Context
    ) -> AsyncIterator[agent_pb2.FetchKvResponse]:
        yield agent_pb2.FetchKvResponse()

    async def ListResidencies(
        self, request: agent_pb2.ListResidenciesRequest, context: Context
    ) -> agent_pb2.ListResidenciesResponse:
        raise UnsupportedError("not scripted")

    async def Evict(
        self, request: agent_pb2.EvictRequest, context: Context
    ) -> agent_pb2.EvictResponse:
        raise UnsupportedError("not scripted")

    async def Drain(
        self, request: agent_pb2.DrainRequest, context: Context
    ) -> agent_pb2.DrainResponse:
        raise UnsupportedError("not scripted")

    async def _stall(self) -> None:
        self.stalled.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@asynccontextmanager
async def answering(agent: ScriptedAgent) -> AsyncIterator[ScriptedAgent]:
    """Let an agent answer while the block runs, and tell it its address."""

    def register(server: grpc.aio.Server) -> None:
        agent_pb2_grpc.add_AgentServiceServicer_to_server(agent, server)

    async with serving("127.0.0.1:0", [NAME], register, 0) as running:
        agent.address = running.address
        await running.set_ready(True)
        yield agent
