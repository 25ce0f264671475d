"""The agent beside a real registry and metastore, and what it does when its engine or they go."""

import asyncio
import os
import signal
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvplane_node_agent.node
import kvplane_node_agent.service
from harness.agents import NOWHERE, Agent, chain_of, running_agent
from harness.engines import EngineProcess
from harness.services import InProcess, free_address, health, until
from harness.tiny_model import words
from kvplane.agent.v1 import agent_pb2, agent_pb2_grpc
from kvplane.common.v1 import node_pb2, records_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane_common.channels import dial
from kvplane_common.errors import from_rpc
from kvplane_common.metastore import MetastoreClient
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve as serve_metastore
from kvplane_node_agent.config import NodeAgentConfig
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.patience import Patience
from kvplane_node_agent.service import serve as serve_agent
from kvplane_registry.config import RegistryConfig
from kvplane_registry.service import serve as serve_registry

StartEngine = Callable[..., Awaitable[EngineProcess]]
LEASE_S = 60.0
"""So long that only a change of load can bring a heartbeat within a test."""


@dataclass
class Cluster:
    metastore: InProcess[MetastoreConfig]
    registry: InProcess[RegistryConfig]
    client: MetastoreClient
    stub: registry_pb2_grpc.RegistryServiceStub

    @property
    def addresses(self) -> dict[str, str]:
        return {"metastore": self.metastore.address, "registry": self.registry.address}

    async def records(self) -> list[records_pb2.Residency]:
        kvs, _ = await self.client.range(b"/cache/n1/")
        return [records_pb2.Residency.FromString(kv.value) for kv in kvs]

    async def node(self) -> node_pb2.Node | None:
        try:
            reply = await self.stub.ListNodes(registry_pb2.ListNodesRequest())
        except grpc.aio.AioRpcError:
            return None
        return next(iter(reply.nodes), None)

    async def until_node(self, holds: Callable[[node_pb2.Node], bool]) -> node_pb2.Node:
        seen: list[node_pb2.Node] = []

        async def holds_now() -> bool:
            node = await self.node()
            if node is not None:
                seen.append(node)
            return node is not None and holds(node)

        await until(holds_now)
        return seen[-1]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    stored = MetastoreConfig(listen=free_address(), data_dir=tmp_path / "log", drain_s=0)
    known = RegistryConfig(
        listen=free_address(), metastore=stored.listen, lease_s=LEASE_S, drain_s=0
    )
    metastore, registry = InProcess(serve_metastore, stored), InProcess(serve_registry, known)
    async with (
        metastore,
        registry,
        dial(stored.listen) as metastore_channel,
        dial(known.listen) as registry_channel,
    ):
        stub = registry_pb2_grpc.RegistryServiceStub(registry_channel)
        yield Cluster(metastore, registry, MetastoreClient(metastore_channel), stub)


async def refusal_of(answer: Awaitable[Any]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return from_rpc(caught.value).reason


async def health_is(agent: Agent, wanted: str) -> None:
    async def holds() -> bool:
        return await health(agent.address) == wanted

    await until(holds)


async def test_the_registry_knows_what_the_node_has_and_does(
    cluster: Cluster, nano_engine: EngineProcess
) -> None:
    async with running_agent(
        nano_engine.url, nano_engine.name, **cluster.addresses, labels={"zone": "a"}
    ) as agent:
        node = await cluster.until_node(lambda node: bool(node.capacity.models))
        assert (node.node_id, node.address, dict(node.labels)) == (
            "n1", agent.address, {"zone": "a"},
        )  # fmt: skip
        (model,) = node.capacity.models
        assert (model.name, model.slots, model.queue_limit) == (nano_engine.name, 1, 8)
        assert not model.HasField("prefill_tokens_per_s")
        await agent.generate(words(100, seed=41))
        node = await cluster.until_node(lambda node: node.load.resident_blocks == 1)
        assert node.capacity.models[0].HasField("prefill_tokens_per_s")


async def test_a_cached_prompt_is_on_record_until_it_is_forgotten(
    cluster: Cluster, nano_engine: EngineProcess
) -> None:
    text = words(50, seed=42)
    async with running_agent(nano_engine.url, nano_engine.name, **cluster.addresses) as agent:
        await agent.generate(text)

        async def recorded() -> bool:
            return bool(await cluster.records())

        await until(recorded)
        (record,) = await cluster.records()
        assert record.chain == chain_of(text).to_proto()
        node = await cluster.until_node(lambda node: True)
        assert record.epoch == node.epoch
        await agent.stub.Evict(agent_pb2.EvictRequest())
        await until_forgotten(cluster)


async def test_a_new_agent_forgets_what_its_predecessor_recorded(
    cluster: Cluster, nano_engine: EngineProcess
) -> None:
    async with running_agent(nano_engine.url, nano_engine.name, **cluster.addresses) as agent:
        await agent.generate(words(50, seed=43))
        before = await cluster.until_node(lambda node: bool(node.capacity.models))
    assert await cluster.records()
    again = {**cluster.addresses, "listen": agent.address}
    async with running_agent(nano_engine.url, nano_engine.name, **again):
        await cluster.until_node(lambda node: node.epoch > before.epoch)
        await until_forgotten(cluster)


async def test_the_registrys_drain_reaches_the_node_and_ends(
    cluster: Cluster, nano_engine: EngineProcess
) -> None:
    async with running_agent(nano_engine.url, nano_engine.name, **cluster.addresses) as agent:
        await cluster.until_node(lambda node: bool(node.capacity.models))
        await cluster.stub.Drain(registry_pb2.DrainRequest(node_id="n1", draining=True))
        await agent.generate("the")  # its change of load brings the heartbeat that tells

        async def refused() -> bool:
            try:
                await agent.generate("the")
            except grpc.aio.AioRpcError as error:
                return from_rpc(error).reason == "NODE_DRAINING"
            return False

        await until(refused)


async def test_it_serves_while_registry_and_metastore_are_away(
    cluster: Cluster, nano_engine: EngineProcess
) -> None:
    async with running_agent(nano_engine.url, nano_engine.name, **cluster.addresses) as agent:
        await cluster.until_node(lambda node: bool(node.capacity.models))
        await cluster.registry.stop()
        await cluster.metastore.stop()
        assert (await agent.generate(words(50, seed=44))).text
        await cluster.metastore.start()
        await cluster.registry.start()
        await cluster.until_node(lambda node: node.load.resident_blocks == 1)

        async def recorded() -> bool:
            return len(await cluster.records()) == 1

        await until(recorded)


async def test_a_stale_epoch_is_followed_by_a_greater_one(
    cluster: Cluster, nano_engine: EngineProcess
) -> None:
    listen = free_address()
    later = 2**52
    ghost = node_pb2.Node(node_id="n1", address=listen, epoch=later)
    await cluster.stub.Register(registry_pb2.RegisterRequest(node=ghost))
    addresses = {**cluster.addresses, "listen": listen}
    async with running_agent(nano_engine.url, nano_engine.name, **addresses) as agent:
        await cluster.until_node(lambda node: node.epoch == later + 1)
        await agent.generate(words(50, seed=45))
        (residency,) = (await agent.listing()).residencies
        assert residency.epoch == later + 1


async def test_an_engine_that_returns_begins_a_new_epoch(
    cluster: Cluster, nano_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(nano_model)
    async with running_agent(engine.url, engine.name, **cluster.addresses) as agent:
        await agent.generate(words(50, seed=46))
        before = await cluster.until_node(lambda node: node.load.resident_blocks == 1)
        await engine.kill()
        await health_is(agent, "NOT_SERVING")
        assert await refusal_of(agent.generate("the")) == "ENGINE_UNAVAILABLE"
        await cluster.until_node(lambda node: not node.capacity.models)
        await engine.start()
        await health_is(agent, "SERVING")
        await cluster.until_node(
            lambda node: node.epoch > before.epoch and bool(node.capacity.models)
        )
        assert not (await agent.listing()).residencies
        await until_forgotten(cluster)
        assert (await agent.generate("the")).text


async def test_an_engine_that_dies_in_an_answer_is_an_error_and_never_a_clean_end(
    mini_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(mini_model)
    async with running_agent(engine.url, engine.name) as agent:
        call = agent.stub.Generate(agent.request("the", 3000))
        steps = aiter(call)
        while not (await anext(steps)).HasField("delta"):
            pass
        waiting = asyncio.create_task(refusal_of(agent.generate("of")))
        await agent.until_queued(1)
        await engine.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert from_rpc(caught.value).reason == "ENGINE_FAILED"
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert await waiting == "ENGINE_UNAVAILABLE"
        await agent.until_idle()


@pytest.mark.parametrize(
    ("text", "reason"),
    [("the", "ENGINE_FAILED"), (words(3000, seed=47), "ENGINE_UNAVAILABLE")],
    ids=["in its answer", "before its first piece"],
)
async def test_an_engine_that_stands_still_does_not_keep_its_slot(
    mini_model: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch,
    text: str, reason: str,
) -> None:  # fmt: skip
    impatient = partial(EngineSettings, query_s=0.5)
    monkeypatch.setattr(kvplane_node_agent.service, "EngineSettings", impatient)
    monkeypatch.setattr(kvplane_node_agent.node, "Patience", lambda: Patience(gone_s=0.2))
    engine = await start_engine(mini_model)
    async with running_agent(engine.url, engine.name) as agent:
        call = agent.stub.Generate(agent.request(text, 3000))
        wanted = "delta" if reason == "ENGINE_FAILED" else "admission"
        while (await anext(aiter(call))).WhichOneof("event") != wanted:
            pass
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            assert await refusal_of(_kinds(call)) == reason
            await agent.until_idle()
        finally:
            os.kill(engine.pid, signal.SIGCONT)


async def test_it_waits_for_an_engine_that_is_not_there_yet(
    nano_model: Path, start_engine: StartEngine
) -> None:
    engine = await start_engine(nano_model)
    await engine.stop()
    async with running_agent(engine.url, engine.name, wait="NOT_SERVING") as agent:
        assert await refusal_of(agent.generate("the")) == "ENGINE_UNAVAILABLE"
        await engine.start()
        await health_is(agent, "SERVING")
        assert (await agent.generate("the")).text


async def test_a_stop_lets_the_running_answer_end(nano_engine: EngineProcess) -> None:
    config = NodeAgentConfig(
        listen=free_address(),
        engine_url=nano_engine.url,
        registry=NOWHERE,
        metastore=NOWHERE,
        drain_s=20,
    )
    service = InProcess(serve_agent, config)
    async with service, dial(config.listen) as channel:
        agent = Agent(config.listen, agent_pb2_grpc.AgentServiceStub(channel), nano_engine.name)
        steps = aiter(agent.stub.Generate(agent.request("the", 1500)))
        while not (await anext(steps)).HasField("delta"):
            pass
        _, rest = await asyncio.gather(service.stop(), _kinds(steps))
        assert rest[-1] == "completion"


async def test_a_stop_says_goodbye(cluster: Cluster, nano_engine: EngineProcess) -> None:
    async with running_agent(nano_engine.url, nano_engine.name, **cluster.addresses):
        await cluster.until_node(lambda node: node.state == node_pb2.Node.STATE_READY)
    # Well before its lease ends.
    node = await cluster.node()
    assert node is not None
    assert node.state == node_pb2.Node.STATE_LOST


async def _kinds(steps: AsyncIterable[agent_pb2.GenerateResponse]) -> list[str | None]:
    return [step.WhichOneof("event") async for step in steps]


async def until_forgotten(cluster: Cluster) -> None:
    async def forgotten() -> bool:
        return not await cluster.records()

    await until(forgotten)
