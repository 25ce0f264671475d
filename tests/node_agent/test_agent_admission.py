"""Slots, queue, blocks, reservations and drain, through a real agent to a real engine."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from harness.agents import Agent, chain_of, running_agent
from harness.engines import EngineProcess
from harness.services import until
from harness.tiny_model import words
from kvplane.agent.v1 import agent_pb2
from kvplane_common.errors import KvplaneError, from_rpc

StartEngine = Callable[..., Awaitable[EngineProcess]]


@asynccontextmanager
async def refused(reason: str) -> AsyncIterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield found
    error = from_rpc(caught.value)
    assert error.reason == reason, error
    found["error"] = error


@asynccontextmanager
async def busy(agent: Agent) -> AsyncIterator[None]:
    """Hold a slot while the block runs."""
    held = await agent.stub.Reserve(agent_pb2.ReserveRequest(model=agent.model, max_tokens=1))
    try:
        yield
    finally:
        await agent.stub.Release(agent_pb2.ReleaseRequest(reservation_id=held.reservation_id))


async def test_who_finds_no_slot_waits_and_who_finds_no_place_is_refused(nano_agent: Agent) -> None:
    async with busy(nano_agent):
        waiting = [asyncio.create_task(nano_agent.generate(f"the {one}")) for one in "ab"]
        await nano_agent.until_queued(2)
        async with refused("QUEUE_FULL") as found:
            await nano_agent.generate("the")
        error = found["error"]
        assert isinstance(error, KvplaneError)
        assert (error.facts["measured"], error.facts["limit"]) == ("2", "2")
        assert error.retry_after_ms
    answers = await asyncio.gather(*waiting)
    assert all(answer.admission.queue_ms > 0 for answer in answers)


async def test_who_is_cancelled_while_waiting_leaves_the_queue(nano_agent: Agent) -> None:
    async with busy(nano_agent):
        call = nano_agent.stub.Generate(nano_agent.request("the"))
        await nano_agent.until_queued(1)
        call.cancel()
        await nano_agent.until_queued(0)
    assert (await nano_agent.generate("the")).text


async def test_a_request_over_the_whole_budget_is_refused_for_good(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model, context_tokens=16384)
    async with running_agent(engine.url, engine.name, kv_budget_mb=16) as agent:
        async with refused("KV_BUDGET_EXCEEDED") as found:
            await agent.generate("the", 10_000)
        assert found["error"].facts["required_blocks"] == "2"
        assert found["error"].facts["total_blocks"] == "1"
        assert found["error"].retry_after_ms is None


async def test_blocks_that_running_requests_hold_are_busy(
    nano_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(nano_model, slots=2)
    async with running_agent(engine.url, engine.name, kv_budget_mb=16) as agent:
        async with busy(agent), refused("KV_BLOCKS_BUSY") as found:
            await agent.generate("the")
        assert found["error"].facts["total_blocks"] == "1"
        assert found["error"].retry_after_ms
        assert (await agent.generate("the")).text


async def test_the_oldest_idle_prompt_makes_room(
    nano_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(nano_model)
    texts = [words(50, seed=seed) for seed in (31, 32, 33)]
    async with running_agent(engine.url, engine.name, kv_budget_mb=32) as agent:
        evicted = [(await agent.generate(text)).admission.evicted_blocks for text in texts]
        assert evicted == [0, 0, 1]
        listing = await agent.listing()
        kept = [one.chain.digests[-8:] for one in listing.residencies]
        assert kept == [chain_of(text).last for text in (texts[2], texts[1])]
        assert (listing.load.resident_blocks, listing.load.active_blocks) == (2, 0)


async def test_idle_prompts_are_forgotten_on_demand(nano_engine: EngineProcess) -> None:
    texts = [words(50, seed=seed) for seed in (34, 35)]
    async with running_agent(nano_engine.url, nano_engine.name, kv_budget_mb=64) as agent:
        for text in texts:
            await agent.generate(text)
        one = agent_pb2.EvictRequest(model=agent.model, digest=chain_of(texts[0]).last)
        assert [(await agent.stub.Evict(one)).evicted for _ in range(2)] == [1, 0]
        assert (await agent.stub.Evict(agent_pb2.EvictRequest(model="other"))).evicted == 0
        assert (await agent.stub.Evict(agent_pb2.EvictRequest())).evicted == 1
        assert not (await agent.listing()).residencies
        async with refused("INVALID_REQUEST"):
            await agent.stub.Evict(agent_pb2.EvictRequest(digest=b"abc"))


async def test_the_tag_latest_means_no_tag(nano_agent: Agent) -> None:
    model = f"{nano_agent.model}:latest"
    asked = agent_pb2.ReserveRequest(model=model, max_tokens=4)
    held = await nano_agent.stub.Reserve(asked)
    text = words(60, seed=37)
    request = nano_agent.request(text, model=model, reservation_id=held.reservation_id)
    assert (await nano_agent.run(request)).text
    listed = await nano_agent.stub.ListResidencies(agent_pb2.ListResidenciesRequest(model=model))
    assert [one.model for one in listed.residencies] == [nano_agent.model]
    evicted = await nano_agent.stub.Evict(agent_pb2.EvictRequest(model=model))
    assert evicted.evicted == 1


async def test_a_reservation_is_used_once(nano_agent: Agent) -> None:
    text = words(60, seed=36)
    asked = agent_pb2.ReserveRequest(
        request_id="r1", model=nano_agent.model, chain=chain_of(text).to_proto(), max_tokens=4
    )
    held, again = await nano_agent.stub.Reserve(asked), await nano_agent.stub.Reserve(asked)
    assert held == again
    assert held.admission.blocks == 1
    assert (await nano_agent.load()).models[0].active == 1
    request = nano_agent.request(text, chained=False, reservation_id=held.reservation_id)
    assert (await nano_agent.run(request)).text
    assert len((await nano_agent.listing()).residencies) == 1
    async with refused("RESERVATION_UNKNOWN"):
        await nano_agent.run(request)
    await nano_agent.stub.Release(agent_pb2.ReleaseRequest(reservation_id=held.reservation_id))
    another = await nano_agent.stub.Reserve(asked)
    assert another.reservation_id != held.reservation_id
    await nano_agent.stub.Release(agent_pb2.ReleaseRequest(reservation_id=another.reservation_id))


async def test_a_reservation_that_is_too_small_is_given_back_and_the_request_admitted_anew(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model, slots=2, context_tokens=16384)
    async with running_agent(engine.url, engine.name, kv_budget_mb=2, block_mb=1) as agent:
        small = agent_pb2.ReserveRequest(model=agent.model, max_tokens=4)
        held = [await agent.stub.Reserve(small) for _ in range(2)]
        assert [one.admission.blocks for one in held] == [1, 1]
        long = agent.request(words(1500, seed=37), reservation_id=held[0].reservation_id)
        async with refused("KV_BLOCKS_BUSY"):
            await agent.run(long)
        long.reservation_id = held[1].reservation_id
        assert (await agent.run(long)).admission.blocks == 2
        await agent.until_idle()


async def test_a_reservation_for_another_model_is_not_used(nano_agent: Agent) -> None:
    async with busy(nano_agent):
        pass
    held = await nano_agent.stub.Reserve(agent_pb2.ReserveRequest(model=nano_agent.model))
    async with refused("RESERVATION_UNKNOWN"):
        await nano_agent.generate("the", model="other", reservation_id=held.reservation_id)
    assert (await nano_agent.generate("the", reservation_id=held.reservation_id)).text


async def test_a_reservation_that_is_given_back_or_expires_frees_its_slot(
    nano_agent: Agent,
) -> None:
    asked = agent_pb2.ReserveRequest(model=nano_agent.model)
    held = await nano_agent.stub.Reserve(asked)
    release = agent_pb2.ReleaseRequest(reservation_id=held.reservation_id)
    for _ in range(2):
        await nano_agent.stub.Release(release)
    await nano_agent.until_idle()
    short = Duration()
    short.FromMilliseconds(50)
    asked.hold_duration.CopyFrom(short)
    late = await nano_agent.stub.Reserve(asked)
    await nano_agent.until_idle()
    async with refused("RESERVATION_UNKNOWN"):
        await nano_agent.generate("the", reservation_id=late.reservation_id)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": -1}, "INVALID_SAMPLING"),
        ({"model": ""}, "INVALID_REQUEST"),
        ({"model": "other"}, "MODEL_NOT_FOUND"),
        ({"hold_duration": Duration(seconds=-1)}, "INVALID_REQUEST"),
    ],
    ids=["negative max_tokens", "no model", "an unknown model", "a negative hold"],
)
async def test_a_reservation_that_cannot_be_is_refused(
    nano_agent: Agent, fields: dict[str, Any], reason: str
) -> None:
    async with refused(reason):
        await nano_agent.stub.Reserve(
            agent_pb2.ReserveRequest(**{"model": nano_agent.model, **fields})
        )


async def test_a_drained_node_ends_what_runs_and_admits_nothing(nano_agent: Agent) -> None:
    async with busy(nano_agent):
        waiting = asyncio.create_task(nano_agent.generate("the"))
        await nano_agent.until_queued(1)
        await nano_agent.stub.Drain(agent_pb2.DrainRequest(draining=True))
        async with refused("NODE_DRAINING"):
            await waiting
        async with refused("NODE_DRAINING"):
            await nano_agent.generate("the")
        assert (await nano_agent.load()).models[0].active == 1
    await nano_agent.stub.Drain(agent_pb2.DrainRequest(draining=False))
    assert (await nano_agent.generate("the")).text


async def test_many_requests_and_cancels_drain_to_nothing(nano_agent: Agent) -> None:
    calls = [nano_agent.stub.Generate(nano_agent.request(f"the {n}", 40)) for n in range(12)]
    readers = [asyncio.create_task(_read(call)) for call in calls]
    for call in calls[::3]:
        call.cancel()
    await asyncio.gather(*readers)
    await nano_agent.until_idle()

    async def nothing_active() -> bool:
        return (await nano_agent.load()).active_blocks == 0

    await until(nothing_active)


async def _read(call: AsyncIterable[agent_pb2.GenerateResponse]) -> None:
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        return
