"""What tests of every room share: tiny models, and real engines that run them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.agents import Agent, running_agent
from harness.engines import EngineProcess
from harness.tiny_model import tiny_model

StartEngine = Callable[..., Awaitable[EngineProcess]]


@pytest.fixture(scope="session")
def nano_model() -> Path:
    """A model of 1 MB: starts in a fraction of a second, thousands of tokens a second."""
    return tiny_model("nano")


@pytest.fixture(scope="session")
def mini_model() -> Path:
    """A model of 20 MB, whose prefill takes long enough to be seen and cancelled."""
    return tiny_model("mini")


@pytest.fixture(scope="session")
async def nano_engine(nano_model: Path) -> AsyncIterator[EngineProcess]:
    """An engine that all tests share: one slot, no host RAM cache. It must not be stopped."""
    async with EngineProcess(nano_model, cache_ram_mb=0) as engine:
        yield engine


@pytest.fixture
async def nano_agent(nano_engine: EngineProcess) -> AsyncIterator[Agent]:
    """An agent in front of the shared engine, which has one slot; two requests may wait."""
    async with running_agent(nano_engine.url, nano_engine.name, queue_limit=2) as agent:
        yield agent
        await agent.until_idle()
        await nano_engine.idle()


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Start engines of the test's own, with the options of EngineProcess; they end with it."""
    async with AsyncExitStack() as engines:

        async def start(model: Path, **options: Any) -> EngineProcess:
            return await engines.enter_async_context(EngineProcess(model, **options))

        yield start
