"""What the router does when a node fails, or the caller goes away."""

import asyncio
from contextlib import aclosing

import grpc
import pytest

from harness.routers import RouterCluster, cluster, generating, refused, routing
from harness.routing import model, node
from harness.scripted_agents import END, STALL, ScriptedAgent, Step, answering
from kvplane.agent.v1 import agent_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.errors import (
    ContextExceededError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidPromptError,
    KvBudgetExceededError,
    ModelNotFoundError,
    NodeDrainingError,
    NodesDrainingError,
    NodeUnreachableError,
    QueueFullError,
    UnavailableError,
)
from kvplane_common.interceptor import Context
from kvplane_router.agents import Agents

__all__ = ["cluster"]


# Failures before the first delta


@pytest.mark.parametrize(
    "script",
    [
        (QueueFullError("full", retry_after_ms=9),),
        (KvBudgetExceededError("too big"),),
        (NodeDrainingError("draining"),),
        (ModelNotFoundError("gone"),),
        (EngineUnavailableError("loading"),),
        (UnavailableError("away"),),
        (EngineFailedError("broke"),),
        (RuntimeError("a bug"),),
        (grpc.StatusCode.CANCELLED,),
        (END,),
    ],
    ids=[
        "a full queue",
        "too small a budget",
        "draining",
        "without the model",
        "without its engine",
        "away",
        "an engine that broke",
        "a bug",
        "a call that the agent cancels",
        "an end without an answer",
    ],
)
async def test_a_node_that_fails_early_is_replaced_by_the_next_best(
    cluster: RouterCluster, script: tuple[Step, ...]
) -> None:
    failing = await cluster.start_agent("a", ScriptedAgent(*script))
    await cluster.start_agent("b", models=(model(prefill_tokens_per_s=100.0),))
    answer = await cluster.generate(request_id="r")
    assert (answer.decision.node_id, answer.decision.attempts) == ("b", 2)
    assert answer.text == "Hello there"
    assert len(failing.asked) == 1
    told = await cluster.explain("r")
    assert [one.node_id for one in told.decision.candidates] == ["b", "a"]
    assert told.decision.candidates[1].excluded_reason
    await cluster.until_idle()


async def test_a_node_where_nobody_answers_is_replaced_and_then_avoided(
    cluster: RouterCluster,
) -> None:
    await cluster.start_agent("a", models=(model(prefill_tokens_per_s=100.0),))
    await cluster.register(node("b", address="127.0.0.1:1"))
    first, second = await cluster.generate(), await cluster.generate(text="another")
    assert (first.decision.node_id, first.decision.attempts) == ("a", 2)
    assert (second.decision.node_id, second.decision.attempts) == ("a", 1)


async def test_when_every_node_refuses_the_most_hopeful_refusal_is_told(
    cluster: RouterCluster,
) -> None:
    full = QueueFullError("full", retry_after_ms=321, measured=4, limit=4)
    await cluster.start_agent("a", ScriptedAgent(full))
    await cluster.start_agent("b", ScriptedAgent(UnavailableError("away")))
    error = await refused(cluster.generate(request_id="r"))
    assert type(error) is QueueFullError
    assert error.retry_after_ms == 321
    assert error.facts == {"measured": "4", "limit": "4"}
    told = await cluster.explain("r")
    assert told.error.startswith("QUEUE_FULL: ")
    await cluster.until_idle()


async def test_that_one_node_drains_is_never_what_a_caller_is_told(cluster: RouterCluster) -> None:
    for name in "abcd":
        await cluster.start_agent(name, ScriptedAgent(NodeDrainingError("draining")))
    for call in (cluster.generate(), cluster.stub.Route(routing())):
        error = await refused(call)
        assert type(error) is NodesDrainingError
        assert error.facts == {"measured": "3", "limit": "0"}


class _Silent(ScriptedAgent):
    """Takes calls about reservations, and never answers."""

    async def Reserve(
        self, request: agent_pb2.ReserveRequest, context: Context
    ) -> agent_pb2.ReserveResponse:
        await self._stall()
        return await super().Reserve(request, context)

    async def Release(
        self, request: agent_pb2.ReleaseRequest, context: Context
    ) -> agent_pb2.ReleaseResponse:
        await self._stall()
        return await super().Release(request, context)


async def test_a_node_that_takes_a_call_and_never_answers_is_unreachable() -> None:
    async with answering(_Silent()) as silent, aclosing(Agents(reserve_s=0.1, release_s=0.1)) as to:
        with pytest.raises(NodeUnreachableError):
            await to.reserve(silent.address, agent_pb2.ReserveRequest(request_id="r"))
        with pytest.raises(NodeUnreachableError):
            await to.release(silent.address, "r1")


async def test_to_release_at_a_node_that_is_away_is_no_error(cluster: RouterCluster) -> None:
    await cluster.register(node("a", address="127.0.0.1:1"))
    release = router_pb2.ReleaseRequest(node_id="a", reservation_id="r")
    assert await cluster.stub.Release(release) == router_pb2.ReleaseResponse()


async def test_a_request_is_tried_on_so_many_nodes_and_no_more(cluster: RouterCluster) -> None:
    agents = [
        await cluster.start_agent(name, ScriptedAgent(UnavailableError("away"))) for name in "abcd"
    ]
    assert type(await refused(cluster.generate())) is NodeUnreachableError
    assert sum(len(agent.asked) for agent in agents) == 3


async def test_a_prompt_too_long_for_one_node_goes_to_a_node_with_more_context_only(
    cluster: RouterCluster,
) -> None:
    long = ContextExceededError("too long", measured=5000, limit=4096)
    told = {"a": 4096, "b": 4096, "c": 8192}
    agents = {}
    for name, context_tokens in told.items():
        script = () if name == "c" else (long,)
        rate = 100.0 if name == "c" else 1000.0
        shape = model(context_tokens=context_tokens, prefill_tokens_per_s=rate)
        agents[name] = await cluster.start_agent(name, ScriptedAgent(*script), models=(shape,))
    answer = await cluster.generate()
    assert (answer.decision.node_id, answer.decision.attempts) == ("c", 2)
    assert len(agents["a"].asked) + len(agents["b"].asked) == 1


async def test_what_is_wrong_with_the_request_itself_is_not_tried_elsewhere(
    cluster: RouterCluster,
) -> None:
    agents = [
        await cluster.start_agent(name, ScriptedAgent(InvalidPromptError("bad"))) for name in "ab"
    ]
    assert type(await refused(cluster.generate())) is InvalidPromptError
    assert sum(len(agent.asked) for agent in agents) == 1
    await cluster.until_idle()


# After the first delta


@pytest.mark.parametrize(
    "last",
    [UnavailableError("away"), EngineFailedError("broke"), RuntimeError("a bug"), END],
    ids=["away", "an engine that broke", "a bug", "an end without completion"],
)
async def test_a_failure_after_the_first_delta_is_an_error_and_never_a_retry(
    cluster: RouterCluster, last: Step
) -> None:
    await cluster.start_agent("a", ScriptedAgent("Hel", last))
    spare = await cluster.start_agent("b", models=(model(prefill_tokens_per_s=100.0),))
    call = cluster.stub.Generate(generating(request_id="r", session_id="s"))
    steps = [await anext(aiter(call)) for _ in range(2)]
    assert [step.WhichOneof("event") for step in steps] == ["decision", "delta"]
    assert type(await refused(anext(aiter(call)))) is EngineFailedError
    assert not spare.asked
    assert cluster.core.index.entries == 0
    assert len(cluster.core.sessions) == 0
    assert (await cluster.explain("r")).error.startswith("ENGINE_FAILED: ")
    await cluster.until_idle()


# Cancels


@pytest.mark.parametrize(
    ("script", "read"), [((STALL,), 0), (("Hel", STALL), 2)], ids=["before", "after"]
)
async def test_a_cancel_around_the_first_delta_reaches_the_agent_and_frees_the_lease(
    cluster: RouterCluster, script: tuple[Step, ...], read: int
) -> None:
    agent = await cluster.start_agent("a", ScriptedAgent(*script))
    call = cluster.stub.Generate(generating(request_id="r"))
    for _ in range(read):
        await anext(aiter(call))
    reading = asyncio.ensure_future(anext(aiter(call)))
    await agent.stalled.wait()
    assert len(cluster.core.reservations) == 1
    call.cancel()
    await asyncio.wait([reading])
    async with asyncio.timeout(20):
        await agent.cancelled.wait()
    await cluster.until_idle()
    assert (await cluster.explain("r")).error.startswith("CANCELLED: ")


async def test_a_deadline_that_passes_reaches_the_agent_too(cluster: RouterCluster) -> None:
    shape = model(prefill_tokens_per_s=None)
    agent = await cluster.start_agent("a", ScriptedAgent(STALL), models=(shape,))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await anext(aiter(cluster.stub.Generate(generating(), timeout=0.3)))
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(20):
        await agent.cancelled.wait()
    await cluster.until_idle()
