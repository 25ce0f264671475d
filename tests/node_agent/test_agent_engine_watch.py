"""How the agent follows an engine that loads, unloads, stumbles and goes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from harness.clock import ManualClock
from harness.services import until
from kvplane.agent.v1 import agent_pb2
from kvplane.common.v1 import prompt_pb2
from kvplane_common.background import background
from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engine_watch import EngineWatch
from kvplane_node_agent.engines.base import Engine, EngineModel, EngineRequest, Finished, Piece
from kvplane_node_agent.generate import Generation
from kvplane_node_agent.ledger import Ledger, Limits
from kvplane_node_agent.memory import Memory
from kvplane_node_agent.node import Node
from kvplane_node_agent.records import Records

UNLOADED = EngineModel("m", loaded=False, slots=1)
LOADED = replace(UNLOADED, loaded=True, context_tokens=4096, kv_bytes_per_token=1024.0)
GIB = 1024**3


class NoWrites:
    """A metastore that keeps nothing."""

    def put(self, key: bytes, value: bytes) -> None: ...

    def delete(self, key: bytes) -> None: ...

    def delete_prefix(self, prefix: bytes) -> None: ...


class ScriptedEngine:
    """Says what a test has it say; `fails` counts the polls that are still to fail."""

    def __init__(self) -> None:
        self.list = [UNLOADED]
        self.fails = 0
        self.polls = 0
        self.closed = False
        self.successor: ScriptedEngine | None = None

    async def describe(self) -> str:
        await self._fail()
        return "scripted 1"

    async def models(self) -> Sequence[EngineModel]:
        await self._fail()
        return self.list

    async def _fail(self) -> None:
        self.polls += 1
        if self.fails:
            self.fails -= 1
            raise EngineUnavailableError("no answer")

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Piece | Finished, None]:
        await self._fail()
        yield Piece("")

    async def close(self) -> None:
        self.closed = True


@asynccontextmanager
async def watched(engine: ScriptedEngine, free_bytes: int = GIB) -> AsyncIterator[Node]:
    records = Records("n1", NoWrites())
    ledger = Ledger("n1", Limits(block_bytes=16 * 1024**2, queue_limit=1), 1, records)
    node = Node(ledger, records, ManualClock())

    async def find() -> Engine:
        return engine if engine.successor is None else engine.successor

    async def read_memory() -> Memory:
        return Memory(free_bytes=free_bytes)

    async with background(EngineWatch(node, find, read_memory, poll_s=0.01).run()):
        await until(_true(lambda: node.ready))
        yield node
    assert engine.closed


def _true(holds: Callable[[], bool]) -> Callable[[], "asyncio.Future[bool]"]:
    def check() -> "asyncio.Future[bool]":
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        done.set_result(holds())
        return done

    return check


async def polled_again(engine: ScriptedEngine, times: int = 2) -> None:
    seen = engine.polls
    await until(_true(lambda: engine.polls >= seen + times))


async def test_the_budget_is_free_memory_until_the_engine_has_allocated() -> None:
    engine = ScriptedEngine()
    async with watched(engine) as node:
        assert node.ledger.pool.total == int(GIB * 0.9) // (16 * 1024**2)
        engine.list = [LOADED]
        await until(_true(lambda: node.ledger.pool.total == 1))
        assert node.capacity().models[0].loaded


async def test_an_unload_begins_a_generation_and_not_an_epoch() -> None:
    engine = ScriptedEngine()
    engine.list = [LOADED]
    async with watched(engine) as node:
        epoch = node.ledger.epoch
        engine.list = [UNLOADED]
        await until(_true(lambda: node.capacity().models[0].generation == 2))
        engine.list = [LOADED]
        await until(_true(lambda: node.capacity().models[0].loaded))
        assert node.capacity().models[0].generation == 2
        assert node.ledger.epoch == epoch


async def test_one_missed_poll_is_no_loss() -> None:
    engine = ScriptedEngine()
    async with watched(engine) as node:
        epoch = node.ledger.epoch
        engine.fails = 1
        await polled_again(engine, times=3)
        assert (node.ready, node.ledger.epoch) == (True, epoch)


async def test_an_engine_that_goes_takes_its_models_and_returns_with_a_new_epoch() -> None:
    engine = ScriptedEngine()
    async with watched(engine) as node:
        epoch = node.ledger.epoch
        engine.fails = 1_000_000
        await until(_true(lambda: not node.ready))
        assert not node.capacity().models
        engine.fails = 0
        await until(_true(lambda: node.ready))
        assert node.ledger.epoch > epoch
        assert node.capacity().models


async def test_another_engine_may_come_in_place_of_one_that_went() -> None:
    engine = ScriptedEngine()
    async with watched(engine) as node:
        engine.successor = ScriptedEngine()
        engine.fails = 1_000_000
        await until(_true(lambda: node.engine is engine.successor and node.ready))
        assert engine.closed
    assert engine.successor.closed


async def test_an_engine_that_goes_between_admission_and_answer_is_unavailable() -> None:
    async with watched(ScriptedEngine()) as node:
        request = agent_pb2.GenerateRequest(model="m", prompt=prompt_pb2.Prompt(text="the"))
        async with aclosing(Generation(node, 16).run(request)) as steps:
            await anext(steps)
            engine, node.engine = node.engine, None
            with pytest.raises(EngineUnavailableError, match="went away"):
                await anext(steps)
        node.engine = engine
        assert not node.ledger.pool.active


async def test_trouble_is_looked_into_at_once() -> None:
    engine = ScriptedEngine()
    async with watched(engine) as node:
        engine.fails = 1_000_000
        node.look_now.set()
        await until(_true(lambda: not node.ready))
