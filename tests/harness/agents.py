"""A node agent in this process, and what tests ask of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import grpc

from harness.services import health, until
from kvplane.agent.v1 import agent_pb2, agent_pb2_grpc
from kvplane.common.v1 import generation_pb2, node_pb2, prompt_pb2
from kvplane_common.chains import Chain
from kvplane_common.channels import dial
from kvplane_common.errors import from_rpc
from kvplane_node_agent.config import NodeAgentConfig
from kvplane_node_agent.service import running

NOWHERE = "127.0.0.1:1"
"""An address at which nobody answers."""


def chain_of(text: str, step_bytes: int = 64) -> Chain:
    """Return a chain over `text`, with a digest each `step_bytes` and at its end."""
    data, running_digest = text.encode(), blake2b(digest_size=8)
    digests, ends = [], []
    for start in range(0, len(data), step_bytes):
        part = data[start : start + step_bytes]
        running_digest.update(part)
        digests.append(running_digest.digest())
        ends.append(start + len(part))
    return Chain(tuple(digests), tuple(ends))


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    admission: agent_pb2.Admission
    text: str
    completion: generation_pb2.Completion

    @property
    def usage(self) -> generation_pb2.Usage:
        return self.completion.usage


class Agent:
    """A running agent, and shorthands for its calls."""

    def __init__(self, address: str, stub: agent_pb2_grpc.AgentServiceStub, model: str) -> None:
        self.address = address
        self.stub = stub
        self.model = model

    def request(
        self, text: str, max_tokens: int = 4, *, chained: bool = True, **fields: Any
    ) -> agent_pb2.GenerateRequest:
        return agent_pb2.GenerateRequest(
            model=fields.pop("model", self.model),
            prompt=prompt_pb2.Prompt(text=text),
            sampling=prompt_pb2.Sampling(max_tokens=max_tokens, temperature=0),
            chain=chain_of(text).to_proto() if chained else None,
            **fields,
        )

    async def generate(self, text: str, max_tokens: int = 4, **fields: Any) -> Answer:
        return await self.run(self.request(text, max_tokens, **fields))

    async def run(self, request: agent_pb2.GenerateRequest) -> Answer:
        steps = [step async for step in self.stub.Generate(request)]
        kinds = [step.WhichOneof("event") for step in steps]
        assert kinds == ["admission", *["delta"] * (len(kinds) - 2), "completion"]
        text = "".join(step.delta.text for step in steps)
        return Answer(steps[0].admission, text, steps[-1].completion)

    async def listing(self) -> agent_pb2.ListResidenciesResponse:
        return await self.stub.ListResidencies(agent_pb2.ListResidenciesRequest())

    async def load(self) -> node_pb2.Load:
        return (await self.listing()).load

    async def evict_all(self) -> None:
        """Forget every idle prompt."""
        await self.stub.Evict(agent_pb2.EvictRequest())

    async def until_admitting(self, admitting: bool = True) -> None:
        """Wait until it takes new work, or takes none because it drains."""

        async def holds() -> bool:
            # A change brings the heartbeat whose answer tells of a drain.
            await self.stub.Evict(agent_pb2.EvictRequest(digest=b"no such."))
            return await self._admits() == admitting

        await until(holds)

    async def _admits(self) -> bool:
        try:
            held = await self.stub.Reserve(agent_pb2.ReserveRequest(model=self.model))
        except grpc.aio.AioRpcError as error:
            if from_rpc(error).reason == "NODE_DRAINING":
                return False
            raise
        request = agent_pb2.ReleaseRequest(reservation_id=held.reservation_id)
        await self.stub.Release(request)
        return True

    async def until_queued(self, count: int) -> None:
        async def holds() -> bool:
            return sum(model.queued for model in (await self.load()).models) == count

        await until(holds)

    async def until_idle(self) -> None:
        """Wait until no slot is held, no one waits and no block is active."""

        async def holds() -> bool:
            load = await self.load()
            return not load.models and not load.active_blocks

        await until(holds)


@asynccontextmanager
async def running_agent(
    engine_url: str, model: str, *, wait: str = "SERVING", **settings: Any
) -> AsyncIterator[Agent]:
    """Run an agent in front of the engine at `engine_url` while the block runs."""
    values = {
        "listen": "127.0.0.1:0",
        "node_id": "n1",
        "registry": NOWHERE,
        "metastore": NOWHERE,
        "drain_s": 0.2,
        "engine_url": engine_url,
    }
    config = NodeAgentConfig(**{**values, **settings})
    async with running(config) as answering, dial(answering.address) as channel:

        async def healthy() -> bool:
            return await health(answering.address) == wait

        await until(healthy)
        yield Agent(answering.address, agent_pb2_grpc.AgentServiceStub(channel), model)
