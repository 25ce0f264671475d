"""A client that goes away frees slot, lease and blocks within a second, on a real engine."""

import asyncio
import sys

import grpc
import pytest

from harness import client_process
from harness.clusters import Cluster, begun, fresh
from harness.services import until
from kvplane_common.errors import DeadlineUnreachableError, from_rpc

FREE_WITHIN_S = 1.0
"""What is promised to operators."""


async def works(cluster: Cluster) -> bool:
    return any([await engine.busy_slots() for engine in cluster.engines.values()])


async def test_a_cancel_in_mid_decode_frees_slot_and_lease_within_a_second(mini: Cluster) -> None:
    call = mini.router.stream(fresh(20), max_tokens=3000)
    home = (await begun(call)).node_id
    assert await mini.engines[home].busy_slots() == 1
    assert len(mini.router.core.reservations) == 1
    call.cancel()
    await mini.until_at_rest(FREE_WITHIN_S)


async def test_a_cancel_in_mid_prefill_frees_slot_and_lease_within_a_second(mini: Cluster) -> None:
    call = mini.router.stream(fresh(3500))
    await until(lambda: works(mini))
    assert len(mini.router.core.reservations) == 1
    call.cancel()
    await mini.until_at_rest(FREE_WITHIN_S)
    processed = [
        slot.get("n_prompt_tokens_processed", 0)
        for engine in mini.engines.values()
        for slot in await engine.slots()
    ]
    assert max(processed) < 3500


async def test_a_cancel_in_the_queue_frees_place_and_lease_and_leaves_the_running_answer(
    mini: Cluster,
) -> None:
    async with mini.only("a"):
        running = mini.router.stream(fresh(20), max_tokens=3000)
        await begun(running)
        waiting = mini.router.stream(fresh(20))
        await mini.agents["a"].until_queued(1)
        assert len(mini.router.core.reservations) == 2
        waiting.cancel()

        async def gone() -> bool:
            (load,) = (await mini.agents["a"].load()).models
            return (load.active, load.queued, len(mini.router.core.reservations)) == (1, 0, 1)

        await until(gone, FREE_WITHIN_S)
        assert await mini.engines["a"].busy_slots() == 1
        running.cancel()
        await mini.until_at_rest(FREE_WITHIN_S)


async def test_a_client_process_that_dies_frees_slot_and_lease_within_a_second(
    mini: Cluster,
) -> None:
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, client_process.__file__, mini.router.address, "mini", fresh(20), "3000"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdout is not None
    assert [(await client.stdout.readline()).strip() for _ in "ab"] == [b"decision", b"delta"]
    assert await works(mini)
    client.kill()
    await client.wait()
    await mini.until_at_rest(FREE_WITHIN_S)


async def test_a_deadline_that_passes_in_mid_decode_frees_slot_and_lease_within_a_second(
    mini: Cluster,
) -> None:
    call = mini.router.stream(fresh(20), max_tokens=3000, limit_s=0.7)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in call:
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert type(from_rpc(raised.value)) is not DeadlineUnreachableError
    await mini.until_at_rest(FREE_WITHIN_S)


async def test_many_cancels_at_any_moment_leave_nothing_held(mini: Cluster) -> None:
    calls = [mini.router.stream(fresh(400), max_tokens=200) for _ in range(12)]
    for call in calls:
        # Some run, some wait, some have not been seen yet.
        await asyncio.sleep(0)
        call.cancel()
    calls = [mini.router.stream(fresh(400), max_tokens=200) for _ in range(6)]
    await until(lambda: works(mini))
    for call in calls:
        call.cancel()
    await mini.until_at_rest(FREE_WITHIN_S)
    assert (await mini.router.ask(fresh(20))).text
