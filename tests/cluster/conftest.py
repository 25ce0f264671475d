"""Whole clusters: agents in front of real engines, with all that a router needs behind it."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from harness.clusters import Cluster, engine_cluster
from harness.engines import EngineProcess
from harness.process_clusters import ProcessCluster, process_cluster

SLOT_TOKENS = 4096
POOL_BLOCKS, BLOCK_TOKENS = 8, 64
"""The small pool's blocks, and the tokens that one of them holds."""


@pytest.fixture(scope="session")
async def mini_engines(mini_model: Path) -> AsyncIterator[list[EngineProcess]]:
    """Two engines with one slot each, whose prefill and decode take long enough to be seen."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(EngineProcess(mini_model, context_tokens=SLOT_TOKENS))
            for _ in "ab"
        ]


@pytest.fixture(scope="session")
async def nano_engines(nano_model: Path) -> AsyncIterator[list[EngineProcess]]:
    """Two fast engines with two slots each."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                EngineProcess(nano_model, slots=2, context_tokens=2 * SLOT_TOKENS)
            )
            for _ in "ab"
        ]


@pytest.fixture(scope="module")
async def mini_cluster(
    mini_engines: list[EngineProcess], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """Two nodes with one slot and twelve blocks each; the routers' policies are ttft and ladder."""
    data_dir = tmp_path_factory.mktemp("mini")
    async with engine_cluster(data_dir, mini_engines, ("ttft", "ladder"), block_mb=1) as cluster:
        yield cluster


@pytest.fixture
async def mini(mini_cluster: Cluster) -> AsyncIterator[Cluster]:
    """That cluster with nothing remembered; after the test nothing may be held."""
    await mini_cluster.forget()
    yield mini_cluster
    await mini_cluster.until_at_rest()


@pytest.fixture(scope="module")
async def nano_cluster(
    nano_engines: list[EngineProcess], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    """Two nodes with two slots, one place to wait and a pool of POOL_BLOCKS small blocks each."""
    data_dir = tmp_path_factory.mktemp("nano")
    async with engine_cluster(
        data_dir,
        nano_engines,
        block_mb=1,
        kv_budget_mb=POOL_BLOCKS,
        kv_bytes_per_token=2**20 / BLOCK_TOKENS,
        queue_limit=1,
    ) as cluster:
        yield cluster


@pytest.fixture
async def nano(nano_cluster: Cluster) -> AsyncIterator[Cluster]:
    """That cluster with nothing remembered; after the test nothing may be held."""
    await nano_cluster.forget()
    yield nano_cluster
    await nano_cluster.until_at_rest()


@pytest.fixture(scope="session")
async def shared_processes(
    mini_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ProcessCluster]:
    """A cluster of processes for all tests that end some of them."""
    async with process_cluster(mini_model, tmp_path_factory.mktemp("processes")) as cluster:
        yield cluster


@pytest.fixture
async def processes(shared_processes: ProcessCluster) -> AsyncIterator[ProcessCluster]:
    """That cluster, whole before the test, which leaves it whole."""
    await shared_processes.until_whole()
    yield shared_processes
    for name in ("metastore", "registry", "engine-1", "engine-2", "node-1", "node-2", "router"):
        if not shared_processes.local.child(name).running:
            await shared_processes.local.restart(name)
