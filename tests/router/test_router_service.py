"""The router through real gRPC, with a real metastore and registry behind it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.routers import RouterCluster, cluster, generating, refused, router_cluster, routing
from harness.routing import MODEL, chain, chat, entry, model
from harness.scripted_agents import STALL, ScriptedAgent
from harness.services import free_address, health, until
from kvplane.common.v1 import prompt_pb2, records_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_common.channels import dial
from kvplane_common.errors import (
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    KvplaneError,
    ModelNotFoundError,
    NodesDrainingError,
    NoNodesError,
    PromptTooLargeError,
    QueueFullError,
    RequestNotFoundError,
)
from kvplane_common.metastore import MetastoreClient, delete, put
from kvplane_router import service
from kvplane_router.config import RouterConfig
from kvplane_router.follow import delete_sessions
from kvplane_router.records import session_record
from kvplane_router.sessions import Session, Sessions

__all__ = ["cluster"]

Stage = router_pb2.Stage


async def write(cluster: RouterCluster, *operations: Any) -> None:
    async with dial(cluster.metastore.address) as channel:
        await MetastoreClient(channel).write(operations)


# The plain way


async def test_an_answer_comes_with_its_decision_first_and_its_cost_last(
    cluster: RouterCluster,
) -> None:
    agent = await cluster.start_agent("a")
    answer = await cluster.generate(request_id="r1")
    assert answer.text == "Hello there"
    assert (answer.decision.request_id, answer.decision.node_id) == ("r1", "a")
    assert (answer.decision.stage, answer.decision.attempts) == (Stage.STAGE_MISS, 1)
    assert answer.completion.usage.prompt_tokens == 100
    assert answer.completion.timings.HasField("ttft_ms")
    assert agent.asked[0].chain == chain("Why is the sky blue?").to_proto()
    assert agent.asked[0].request_id == "r1"
    await cluster.until_idle()


async def test_without_a_delta_there_is_no_time_to_first_token(cluster: RouterCluster) -> None:
    silent = ScriptedAgent()
    silent.script = ()
    await cluster.start_agent("a", silent)
    answer = await cluster.generate()
    assert not answer.completion.timings.HasField("ttft_ms")


async def test_the_same_prompt_again_is_exact_and_the_next_turn_is_of_the_session(
    cluster: RouterCluster,
) -> None:
    await cluster.start_agent("a")
    await cluster.start_agent("b")
    prompt = chat("be kind " * 100, "hello")
    first = await cluster.generate(prompt=prompt, session_id="s/1")
    again = await cluster.generate(prompt=prompt)
    longer = chat("be kind " * 100, "hello", "Hello there", "and you?")
    second = await cluster.generate(prompt=longer, session_id="s/1")
    assert again.decision.stage == Stage.STAGE_EXACT
    assert second.decision.stage == Stage.STAGE_SESSION
    nodes = {answer.decision.node_id for answer in (first, again, second)}
    assert len(nodes) == 1


async def test_the_tag_latest_means_none(cluster: RouterCluster) -> None:
    agent = await cluster.start_agent("a")
    await cluster.generate(text="hello")
    tagged = await cluster.generate(text="hello", model=f"{MODEL}:latest")
    await cluster.stub.Route(routing(text="hello", model=f"{MODEL}:latest"))
    assert tagged.decision.stage == Stage.STAGE_EXACT
    told = [asked.model for asked in agent.asked] + [asked.model for asked in agent.reserved]
    assert told == [MODEL] * 3


async def test_only_the_record_of_an_expired_session_is_deleted(cluster: RouterCluster) -> None:
    ours = [
        Session(
            "default", name, MODEL, "a", 1, last_digest=b"8" * 8, last_end=9, tokens=3, expire_ms=1
        )
        for name in ("expired", "renewed elsewhere", "never stored")
    ]
    renewed = session_record(replace(ours[1], node_id="b", expire_ms=2**41))
    await write(cluster, put(ours[0].key, session_record(ours[0])), put(ours[1].key, renewed))
    sessions = Sessions()
    for session in ours:
        sessions.put(session)
    async with dial(cluster.metastore.address) as channel:
        await delete_sessions(MetastoreClient(channel), sessions, sessions.expired(1))
    assert await cluster.stored(b"/session/") == {ours[1].key: renewed}
    assert len(sessions) == 0


async def test_expired_sessions_wait_for_a_metastore_that_is_away() -> None:
    sessions = Sessions()
    sessions.put(Session("default", "s", MODEL, "a", 1, b"8" * 8, 9, 3, expire_ms=1))
    async with dial(free_address()) as channel:
        await delete_sessions(MetastoreClient(channel), sessions, sessions.expired(1))
    assert len(sessions) == 1


async def test_a_router_that_stops_still_follows_the_nodes_while_answers_run(
    cluster: RouterCluster,
) -> None:
    agent = await cluster.start_agent("a", ScriptedAgent("Hel", STALL))
    config = RouterConfig(
        listen=free_address(),
        metastore=cluster.metastore.address,
        registry=cluster.registry.address,
        drain_s=20,
    )
    router = service.answering(config)
    _, cluster.core = await router.__aenter__()
    async with dial(config.listen) as channel:
        await until(lambda: _is_serving(config.listen))
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(generating())
        await anext(aiter(call))
        await agent.stalled.wait()
        stopping = asyncio.ensure_future(router.__aexit__(None, None, None))
        await cluster.start_agent("b")  # which waits until this router knows it
        assert not stopping.done()
        call.cancel()
        await stopping


async def _is_serving(address: str) -> bool:
    return await health(address) == "SERVING"


async def test_a_session_is_stored_for_other_routers_and_restarts(cluster: RouterCluster) -> None:
    await cluster.start_agent("a")
    await cluster.generate(text="hello", session_id="s/1")

    async def holds() -> bool:
        return bool(await cluster.stored(b"/session/"))

    await until(holds)
    stored = await cluster.stored(b"/session/")
    session = records_pb2.Session.FromString(stored[b"/session/default/s/1"])
    assert (session.tenant, session.session_id, session.node_id) == ("default", "s/1", "a")
    assert session.last_digest == chain("hello").last


async def test_a_long_prompt_is_chained_all_the_same(cluster: RouterCluster) -> None:
    agent = await cluster.start_agent("a")
    text = "x" * 200_000
    await cluster.generate(text=text)
    assert agent.asked[0].chain == chain(text).to_proto()


async def test_agents_records_draw_requests_and_their_removal_ends_that(
    cluster: RouterCluster,
) -> None:
    await cluster.start_agent("a")
    await cluster.start_agent("b")
    cached = entry("b", chain(chat("be kind " * 100, "hello")))
    record = records_pb2.Residency(
        node_id="b", model="llama", chain=cached.chain.to_proto(), epoch=1, generation=1
    )

    async def indexed(count: int) -> None:
        async def holds() -> bool:
            return cluster.core.index.entries == count

        await until(holds)

    await write(cluster, put(cached.key, record.SerializeToString()), put(b"/cache/junk", b"\xff"))
    await indexed(1)
    prompt = chat("be kind " * 100, "hello")
    decision = (await cluster.stub.Route(routing(prompt=prompt))).decision
    assert (decision.node_id, decision.stage) == ("b", Stage.STAGE_EXACT)
    await write(cluster, delete(cached.key))
    await indexed(0)
    decision = (await cluster.stub.Route(routing(prompt=prompt))).decision
    assert decision.stage == Stage.STAGE_MISS


async def test_serving_goes_on_without_metastore_and_registry(cluster: RouterCluster) -> None:
    await cluster.start_agent("a")
    await cluster.generate(text="hello", session_id="s")
    await cluster.metastore.stop()
    await cluster.registry.stop()
    answer = await cluster.generate(text="hello", session_id="s")
    assert answer.decision.stage == Stage.STAGE_SESSION
    assert await health(cluster.address) == "SERVING"


async def test_the_router_is_not_ready_before_it_has_seen_all_there_is(tmp_path: Path) -> None:
    async with router_cluster(tmp_path) as made:
        await made.metastore.stop()
        await made.start_router(health_is="NOT_SERVING")
        await made.metastore.start()
        await made.until_health_is("SERVING")


# Refusals at the door


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"model": ""}, InvalidRequestError),
        ({"text": ""}, InvalidPromptError),
        ({"prompt": prompt_pb2.Prompt()}, InvalidPromptError),
        ({"sampling": prompt_pb2.Sampling(max_tokens=0)}, InvalidSamplingError),
        ({"text": "x" * 101}, PromptTooLargeError),
        ({"request_id": "r" * 129}, InvalidRequestError),
        ({"session_id": "s" * 129}, InvalidRequestError),
        ({"request_id": "evil\x1b[2J"}, InvalidRequestError),
        ({"session_id": "one\ntwo"}, InvalidRequestError),
        ({"model": "other"}, ModelNotFoundError),
    ],
    ids=[
        "no model",
        "an empty text",
        "no prompt",
        "no tokens to generate",
        "too many bytes",
        "a long request id",
        "a long session id",
        "a request id that would clear a terminal",
        "a session id of two lines",
        "a model that is not there",
    ],
)
async def test_a_bad_request_is_refused_by_both_doors(
    tmp_path: Path, asked: dict[str, Any], kind: type[KvplaneError]
) -> None:
    async with router_cluster(tmp_path) as made:
        await made.start_router(max_prompt_bytes=100)
        agent = await made.start_agent("a")
        for call in (made.generate(**asked), made.stub.Route(routing(**asked))):
            error = await refused(call)
            assert type(error) is kind
        assert not agent.asked


async def test_numbers_come_with_a_prompt_that_is_too_large(tmp_path: Path) -> None:
    async with router_cluster(tmp_path) as made:
        await made.start_router(max_prompt_bytes=100)
        error = await refused(made.generate(text="x" * 200))
        assert (error.facts["measured"], error.facts["limit"]) == ("203", "100")


async def test_without_nodes_it_is_said_that_there_are_none(cluster: RouterCluster) -> None:
    error = await refused(cluster.generate())
    assert type(error) is NoNodesError


async def test_a_drained_fleet_is_told_from_an_empty_one(cluster: RouterCluster) -> None:
    await cluster.start_agent("a")
    async with dial(cluster.registry.address) as channel:
        stub = registry_pb2_grpc.RegistryServiceStub(channel)
        await stub.Drain(registry_pb2.DrainRequest(node_id="a", draining=True))

    async def holds() -> bool:
        known = cluster.core.fleet.get("a")
        return known is not None and known.draining

    await until(holds)
    assert type(await refused(cluster.generate())) is NodesDrainingError


# Route and Explain


async def test_a_route_reserves_and_release_gives_back(cluster: RouterCluster) -> None:
    agent = await cluster.start_agent("a")
    sampling = prompt_pb2.Sampling(max_tokens=7)
    routed = await cluster.stub.Route(routing(text="hello", sampling=sampling, request_id="r"))
    assert (routed.address, routed.reservation_id) == (agent.address, "held-1")
    assert routed.decision.node_id == "a"
    assert agent.reserved[0].max_tokens == 7
    assert agent.reserved[0].chain == chain("hello").to_proto()
    assert len(cluster.core.reservations) == 1
    release = router_pb2.ReleaseRequest(node_id="a", reservation_id="held-1")
    for _ in range(2):
        await cluster.stub.Release(release)
    assert agent.released == ["held-1", "held-1"]
    assert len(cluster.core.reservations) == 0


async def test_each_route_makes_a_reservation_of_its_own(cluster: RouterCluster) -> None:
    agent = await cluster.start_agent("a")
    for _ in range(2):
        await cluster.stub.Route(routing(request_id="same"))
    assert len({asked.request_id for asked in agent.reserved}) == 2


async def test_a_burst_of_routes_spreads(cluster: RouterCluster) -> None:
    for name in "abcd":
        await cluster.start_agent(name)
    routed = await asyncio.gather(*(cluster.stub.Route(routing(text=str(n))) for n in range(8)))
    nodes = [one.decision.node_id for one in routed]
    assert sorted(nodes) == sorted("abcd" * 2)


async def test_a_route_too_is_tried_on_the_next_best_node(cluster: RouterCluster) -> None:
    await cluster.start_agent("a", ScriptedAgent(QueueFullError("full")))
    await cluster.start_agent("b", models=(model(prefill_tokens_per_s=100.0),))
    routed = await cluster.stub.Route(routing())
    assert (routed.decision.node_id, routed.decision.attempts) == ("b", 2)
    assert len(cluster.core.reservations) == 1


async def test_releasing_at_a_node_that_is_gone_is_no_error(cluster: RouterCluster) -> None:
    release = router_pb2.ReleaseRequest(node_id="nowhere", reservation_id="r")
    assert await cluster.stub.Release(release) == router_pb2.ReleaseResponse()


async def test_an_explanation_has_the_prediction_and_what_was_measured(
    cluster: RouterCluster,
) -> None:
    await cluster.start_agent("a", ScriptedAgent("Hi", cached_tokens=90))
    for request_id in ("r1", "r2"):
        await cluster.generate(text="hello " * 100, request_id=request_id)
    told, latest = await cluster.explain("r2"), await cluster.explain()
    assert told == latest
    assert told.decision.stage == Stage.STAGE_EXACT
    assert told.decision.predicted_cached_tokens > 0
    assert told.completion.usage.cached_tokens == 90
    assert told.decision.candidates[0].total_ms > 0
    assert not told.error


async def test_an_unknown_request_cannot_be_explained(cluster: RouterCluster) -> None:
    assert type(await refused(cluster.explain("nobody"))) is RequestNotFoundError
