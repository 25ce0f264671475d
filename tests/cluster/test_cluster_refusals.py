"""Every reason for which a request is refused, as a client of the router hears it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.clusters import Cluster, Router, bare_cluster, drawing, engine_cluster, fresh, refused
from harness.engines import EngineProcess
from kvplane.common.v1 import prompt_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.channels import MAX_MESSAGE_BYTES
from kvplane_common.errors import (
    ContextExceededError,
    DeadlineUnreachableError,
    EngineUnavailableError,
    InvalidPromptError,
    InvalidSamplingError,
    KvBlocksBusyError,
    KvBudgetExceededError,
    KvplaneError,
    ModelNotFoundError,
    NodesDrainingError,
    NoNodesError,
    PromptTooLargeError,
    QueueFullError,
)
from kvplane_common.requests import least_tokens

StartEngine = Callable[..., Awaitable[EngineProcess]]


def tells(error: KvplaneError, kind: type[KvplaneError], measured: object, limit: object) -> None:
    """Check what was raised, and the figures that it carries."""
    assert type(error) is kind, error
    assert (error.facts["measured"], error.facts["limit"]) == (str(measured), str(limit))


@asynccontextmanager
async def reserved(router: Router, count: int, **asked: Any) -> AsyncIterator[None]:
    """Hold that many reservations while the block runs."""
    held = [await router.route(fresh(20), **asked) for _ in range(count)]
    try:
        yield
    finally:
        for routed in held:
            await router.release(routed)


# By what is asked


async def test_an_empty_prompt_is_refused(nano: Cluster) -> None:
    error = await refused(nano.router.ask(""))
    assert type(error) is InvalidPromptError
    assert error.facts["field"] == "prompt.text"
    assert "at least 1 byte" in str(error)


async def test_a_conversation_without_messages_is_refused(nano: Cluster) -> None:
    prompt = prompt_pb2.Prompt(chat=prompt_pb2.Chat())
    error = await refused(nano.router.ask(prompt=prompt))
    tells(error, InvalidPromptError, measured=0, limit=1)


async def test_a_negative_number_of_tokens_is_refused(nano: Cluster) -> None:
    error = await refused(nano.router.ask("the", max_tokens=-5))
    tells(error, InvalidSamplingError, measured=-5, limit=1)
    assert error.facts["field"] == "sampling.max_tokens"


async def test_a_prompt_over_the_routers_limit_is_refused(nano: Cluster) -> None:
    prompt = prompt_pb2.Prompt(text="x" * (8 * 2**20 + 1))
    error = await refused(nano.router.ask(prompt=prompt))
    tells(error, PromptTooLargeError, measured=prompt.ByteSize(), limit=8 * 2**20)


async def test_a_message_over_the_size_of_the_wire_is_refused_with_both_sizes(
    nano: Cluster,
) -> None:
    request = nano.router.request("x" * (MAX_MESSAGE_BYTES + 1))
    async with grpc.aio.insecure_channel(nano.router.address) as plain:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await plain.unary_unary(
                "/kvplane.router.v1.RouterService/Route",
                request_serializer=router_pb2.GenerateRequest.SerializeToString,
            )(request)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{request.ByteSize()} vs. {MAX_MESSAGE_BYTES}" in (raised.value.details() or "")


async def test_a_prompt_over_the_context_is_refused_with_what_the_engine_counts(
    mini: Cluster,
) -> None:
    error = await refused(mini.router.ask(fresh(5_000)))
    tells(error, ContextExceededError, error.facts["measured"], limit=4096)
    assert int(error.facts["measured"]) == pytest.approx(5_000, rel=0.1)
    assert error.facts["measured"] in str(error)
    assert "4096" in str(error)


async def test_a_prompt_that_is_surely_over_the_context_reaches_no_engine(mini: Cluster) -> None:
    text = fresh(50_000)
    error = await refused(mini.router.ask(text))
    tells(error, ContextExceededError, error.facts["measured"], limit=4096)
    assert int(error.facts["measured"]) == pytest.approx(least_tokens(len(text)), abs=2)
    assert f"at least {error.facts['measured']} tokens" in str(error)


async def test_a_request_that_no_pool_could_hold_is_refused_for_the_budget(nano: Cluster) -> None:
    error = await refused(nano.router.ask(fresh(20), max_tokens=700))
    tells(error, KvBudgetExceededError, error.facts["measured"], limit=8)
    assert 11 <= int(error.facts["measured"]) <= 12


async def test_an_unknown_model_is_refused_and_the_known_ones_are_named(nano: Cluster) -> None:
    error = await refused(nano.router.ask("the", model="nanno"))
    tells(error, ModelNotFoundError, measured="nanno", limit="nano")
    assert str(error) == "no node has model 'nanno'; the models there are: nano"


# By what is busy


async def test_blocks_that_running_requests_hold_are_refused_with_a_time_to_retry(
    nano: Cluster,
) -> None:
    async with reserved(nano.router, 2, max_tokens=350):
        await nano.router.until(lambda core: all(node.active_blocks for node in core.fleet.alive()))
        error = await refused(nano.router.ask(fresh(20), max_tokens=200))
    assert type(error) is KvBlocksBusyError
    assert error.retry_after_ms
    assert int(error.facts["measured"]) > int(error.facts["limit"])


async def test_a_full_queue_is_refused_with_a_time_to_retry(nano: Cluster) -> None:
    router = nano.router
    async with reserved(router, 4):
        waiting = [asyncio.create_task(router.ask(fresh(20))) for _ in nano.agents]
        for agent in nano.agents.values():
            await agent.until_queued(1)
        error = await refused(router.ask(fresh(20)))
    tells(error, QueueFullError, measured=3, limit=3)
    assert error.retry_after_ms
    assert all(answer.text for answer in await asyncio.gather(*waiting))


async def test_a_deadline_that_no_node_can_meet_is_refused_at_once(mini: Cluster) -> None:
    for node_id in mini.agents:
        async with mini.only(node_id):
            await mini.router.ask(fresh(300))  # it measures its prefill
    await mini.until_at_rest()
    # One is let through to measure again; whether it makes it depends on the machine.
    await asyncio.gather(mini.router.ask(fresh(3_500), limit_s=0.8), return_exceptions=True)
    await mini.until_at_rest()
    error = await refused(mini.router.ask(fresh(3_500), limit_s=0.8))
    assert type(error) is DeadlineUnreachableError
    assert error.retry_after_ms
    assert int(error.facts["measured"]) > int(error.facts["limit"])
    assert 0 < int(error.facts["limit"]) <= 800
    assert await mini.at_rest()


async def test_draining_nodes_are_refused_and_one_that_is_not_is_taken(nano: Cluster) -> None:
    async with nano.only("b"):
        async with nano.only("a"):
            error = await refused(nano.router.ask("the"))
            tells(error, NodesDrainingError, measured=2, limit=0)
        assert (await nano.router.ask("the")).decision.node_id == "b"


# By what is away


async def test_a_fleet_without_nodes_is_refused(tmp_path: Path) -> None:
    async with bare_cluster(tmp_path, "nano") as cluster:
        await cluster.add_router()
        error = await refused(cluster.router.ask("the"))
        tells(error, NoNodesError, measured=0, limit=1)


async def test_an_engine_that_is_gone_is_refused_as_unavailable_also_when_that_is_known(
    start_engine: StartEngine, nano_model: Path, tmp_path: Path
) -> None:
    engine = await start_engine(nano_model)
    async with engine_cluster(tmp_path, [engine]) as cluster:
        cluster.engines.clear()
        await engine.kill()
        error = await refused(cluster.router.ask(fresh(20)))
        assert type(error) is EngineUnavailableError
        await cluster.router.until_knows([])
        error = await refused(cluster.router.ask(fresh(20)))
        assert type(error) is EngineUnavailableError
        await engine.start()
        await cluster.router.until_knows(["a"])
        assert (await cluster.router.ask(fresh(20))).text


async def test_refusals_of_every_kind_leave_nothing_held(nano: Cluster) -> None:
    asked: list[dict[str, Any]] = [
        {"text": ""},
        {"text": "the", "model": "nanno"},
        {"text": "the", "sampling": drawing(-1)},
        {"text": fresh(20), "max_tokens": 700},
    ]
    for one in asked:
        await refused(nano.router.ask(**one))
        await refused(nano.router.route(**one))
    assert await nano.at_rest()
