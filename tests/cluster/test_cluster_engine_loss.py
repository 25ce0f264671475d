"""Engines that die under a request, and what the client and the books see of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from harness.clusters import Cluster, Stream, begun, engine_cluster, fresh, next_step, refused
from harness.engines import EngineProcess
from harness.services import until
from kvplane_common.errors import EngineFailedError

StartEngine = Callable[..., Awaitable[EngineProcess]]


@pytest.fixture
async def own(
    mini_model: Path, start_engine: StartEngine, tmp_path: Path
) -> AsyncIterator[Cluster]:
    """Two nodes whose engines the test may kill."""
    engines = [await start_engine(mini_model) for _ in "ab"]
    async with engine_cluster(tmp_path, engines, block_mb=1) as cluster:
        yield cluster


async def kill(cluster: Cluster, node_id: str) -> EngineProcess:
    engine = cluster.engines.pop(node_id)
    await engine.kill()
    return engine


async def test_an_engine_that_dies_before_its_first_token_is_replaced_by_the_next_node(
    own: Cluster,
) -> None:
    call = own.router.stream(fresh(2500))
    busy: list[str] = []

    async def works() -> bool:
        busy[:] = [name for name, engine in own.engines.items() if await engine.busy_slots()]
        return bool(busy)

    await until(works)
    await kill(own, busy[0])
    steps = [step async for step in call]
    assert steps[0].decision.attempts == 2
    assert steps[0].decision.node_id != busy[0]
    assert steps[-1].HasField("completion")
    await own.until_at_rest()


async def test_an_engine_that_dies_in_its_answer_is_an_error_and_nothing_stays_held(
    own: Cluster,
) -> None:
    call = own.router.stream(fresh(20), max_tokens=3000, request_id="cut")
    home = (await begun(call)).node_id
    await kill(own, home)
    error = await refused(_to_the_end(call))
    assert type(error) is EngineFailedError
    assert error.code is grpc.StatusCode.ABORTED
    assert "ENGINE_FAILED" in (await own.router.explain("cut")).error
    await own.until_at_rest()


async def _to_the_end(call: Stream) -> None:
    while (await next_step(call)).HasField("delta"):
        pass


async def test_a_restarted_engine_begins_with_nothing_credited(own: Cluster) -> None:
    said = fresh(150)
    first = await own.router.ask(said, session_id="s")
    home = first.decision.node_id
    await own.until_recorded()
    epoch = _epoch(own, home)
    engine = await kill(own, home)
    moved = await own.router.ask(said + " the", session_id="s")
    assert moved.decision.node_id != home
    assert moved.completion.usage.cached_tokens < 64
    await engine.start()
    await own.router.until(lambda core: _epoch(own, home) > epoch)
    await own.router.until_knows(list(own.agents))
    routed = await own.router.route(said)
    await own.router.release(routed)
    told = routed.decision
    credited = {one.node_id: one.predicted_cached_tokens for one in told.candidates}
    assert credited[home] == 0
    assert credited[moved.decision.node_id] > 100
    own.engines[home] = engine


def _epoch(cluster: Cluster, node_id: str) -> int:
    node = cluster.router.core.fleet.get(node_id)
    return node.epoch if node else 0
