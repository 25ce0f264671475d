"""A node is drained while it works."""

import asyncio

import grpc

from harness.clusters import Cluster, begun, fresh, next_step
from kvplane.router.v1 import router_pb2


async def test_a_drain_lets_the_running_answer_end_and_moves_who_waits(mini: Cluster) -> None:
    async with mini.only("a"):
        running = mini.router.stream(fresh(20), max_tokens=1000)
        await begun(running)
        waiting = asyncio.create_task(mini.router.ask(fresh(20)))
        await mini.agents["a"].until_queued(1)
    async with mini.only("b"):
        moved = (await waiting).decision
        assert (moved.node_id, moved.attempts) == ("b", 2)
        assert (await mini.agents["a"].load()).models[0].active == 1
        while (step := await next_step(running)).HasField("delta"):
            pass
        assert step.completion.usage.completion_tokens == 1000
        assert await running.read() is grpc.aio.EOF


async def test_a_session_leaves_a_draining_node_and_nothing_there_is_credited(
    mini: Cluster,
) -> None:
    text = fresh(150)
    async with mini.only("a"):
        assert (await mini.router.ask(text, session_id="d")).decision.node_id == "a"
    async with mini.only("b"):
        moved = await mini.router.ask(text + " the", session_id="d")
        assert moved.decision.node_id == "b"
        assert moved.decision.stage == router_pb2.STAGE_MISS
