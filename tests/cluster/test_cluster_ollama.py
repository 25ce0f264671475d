"""The same path with agents in front of Ollama."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from harness.clusters import Cluster, bare_cluster, begun, fresh, refused
from harness.ollama_standin import OllamaStandIn
from harness.routing import chat
from kvplane.common.v1 import generation_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.errors import ModelNotFoundError
from kvplane_router.core import Core

MODEL = "tiny"
TAG = "tiny:latest"
Stage = router_pb2.Stage


@pytest.fixture(scope="module")
async def ollama_cluster(
    mini_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """One node in front of a current Ollama, and one before it reported cached tokens."""
    current = OllamaStandIn({TAG: mini_model})
    older = OllamaStandIn({TAG: mini_model}, version="0.12.0")
    data_dir = tmp_path_factory.mktemp("ollama")
    async with current.running(), older.running(), bare_cluster(data_dir, MODEL) as cluster:
        for node_id, standin in (("current", current), ("older", older)):
            await cluster.add_agent(node_id, standin.url, block_mb=1)
        await cluster.add_router()
        yield cluster
        await cluster.until_at_rest()


@pytest.fixture(params=["current", "older"])
async def on(request: pytest.FixtureRequest, ollama_cluster: Cluster) -> AsyncIterator[Cluster]:
    """The cluster with all but one node drained, which has loaded its model."""
    async with ollama_cluster.only(request.param):
        await ollama_cluster.router.ask(fresh(300))
        await ollama_cluster.router.until(lambda core: _is_loaded(core, request.param))
        yield ollama_cluster
    await ollama_cluster.until_at_rest()


def _is_loaded(core: Core, node_id: str) -> bool:
    node = core.fleet.get(node_id)
    return node is not None and node.models[MODEL].loaded


async def test_every_stage_is_reached_in_front_of_ollama(on: Cluster) -> None:
    said = [fresh(300), fresh(20)]
    miss = await on.router.ask(prompt=chat(*said), session_id="o")
    exact = await on.router.ask(prompt=chat(*said))
    session = await on.router.ask(prompt=chat(*said, exact.text, fresh(20)), session_id="o")
    prefix = await on.router.ask(prompt=chat(said[0], fresh(20)))
    stages = [answer.decision.stage for answer in (miss, exact, session, prefix)]
    assert stages == [
        *(Stage.STAGE_MISS, Stage.STAGE_EXACT, Stage.STAGE_SESSION, Stage.STAGE_PREFIX)
    ]
    for answer in (exact, session, prefix):
        usage = answer.completion.usage
        if answer.decision.node_id == "current":
            assert usage.evidence == generation_pb2.EVIDENCE_MEASURED
            assert usage.cached_tokens > 0.8 * miss.completion.usage.prompt_tokens
        else:
            # It does not say: that is no hit and no miss, and nobody calls it measured.
            assert usage.evidence != generation_pb2.EVIDENCE_MEASURED
            assert usage.HasField("cached_tokens") == bool(usage.evidence)


async def test_an_unknown_model_is_refused_in_front_of_ollama(ollama_cluster: Cluster) -> None:
    error = await refused(ollama_cluster.router.ask("the", model="tiny:7b"))
    assert type(error) is ModelNotFoundError
    assert error.facts["limit"] == MODEL


async def test_a_cancel_frees_the_slot_in_front_of_ollama_within_a_second(
    ollama_cluster: Cluster,
) -> None:
    call = ollama_cluster.router.stream(fresh(20), max_tokens=3000)
    await begun(call)
    call.cancel()
    await ollama_cluster.until_at_rest(1.0)
