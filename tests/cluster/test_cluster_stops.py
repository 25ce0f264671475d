"""SIGTERM to each service of a cluster while it works."""

import asyncio

import grpc
import pytest

from harness.clusters import Stream, begun, fresh, next_step, refused
from harness.flows import flowing
from harness.process_clusters import ProcessCluster
from kvplane.common.v1 import generation_pb2

ANSWER_TOKENS = 1000
"""A second or more of decode, much longer than a service takes to hear its signal."""


async def begin(processes: ProcessCluster) -> tuple[Stream, str]:
    """Begin a long answer and return it with its node, once its first delta is there."""
    call = processes.router.stream(fresh(20), max_tokens=ANSWER_TOKENS, request_id="long")
    return call, (await begun(call)).node_id


async def ended(call: Stream) -> generation_pb2.Completion:
    """Read an answer to its clean end."""
    while (step := await next_step(call)).HasField("delta"):
        pass
    assert await call.read() is grpc.aio.EOF
    assert step.completion.usage.completion_tokens == ANSWER_TOKENS
    return step.completion


async def runs(processes: ProcessCluster) -> bool:
    """Tell whether the long answer has not ended yet."""
    return not (await processes.router.explain("long")).HasField("completion")


async def test_a_router_that_is_told_to_stop_lets_its_answers_end_and_takes_no_more(
    processes: ProcessCluster,
) -> None:
    call, home = await begin(processes)
    stopping = asyncio.create_task(processes.terminate("router"))
    await processes.until_health("router", "AWAY")
    error = await refused(processes.router.route("the"))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert (await processes.agents[home].load()).models
    await ended(call)
    assert await stopping == 0


async def test_an_agent_that_is_told_to_stop_lets_its_answer_end_and_no_other_fails(
    processes: ProcessCluster,
) -> None:
    async with flowing(processes.router, lanes=1) as flow:
        await flow.until_answered(1)
        call, home = await begin(processes)
        stopping = asyncio.create_task(processes.terminate(home))
        await processes.until_health(home, "AWAY")
        assert await runs(processes)
        await ended(call)
        assert await stopping == 0
        await flow.until_answered(2)
        await processes.local.restart(home)


@pytest.mark.parametrize("name", ["metastore", "registry"])
async def test_a_rolling_restart_fails_no_request_and_breaks_no_answer(
    processes: ProcessCluster, name: str
) -> None:
    async with flowing(processes.router, lanes=1) as flow:
        await flow.until_answered(1)
        call, _ = await begin(processes)
        assert await processes.terminate(name) == 0
        assert await runs(processes)
        await flow.until_answered(2)
        await processes.local.restart(name)
        await flow.until_answered(2)
        await ended(call)
