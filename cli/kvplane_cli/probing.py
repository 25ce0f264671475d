"""Finding out whether an engine answers, before a cluster is built on it."""

import asyncio
from collections.abc import Sequence

from kvplane_cli.layout import Upstream
from kvplane_cli.shell import CliError
from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engines.detect import detect
from kvplane_node_agent.engines.settings import EngineSettings

OLLAMA_URL = "http://127.0.0.1:11434"
"""Where an Ollama answers unless it was told otherwise."""

_PROBE_S = 0.5


async def check_engines(engines: Sequence[Upstream]) -> None:
    """Raise CliError, naming the first URL where no engine answers, as a node agent sees it."""
    async with asyncio.TaskGroup() as group:
        checks = [group.create_task(_why_not(EngineSettings(engine.url))) for engine in engines]
    for engine, check in zip(engines, checks, strict=True):
        if why := check.result():
            raise CliError(f"no engine answers at {engine.url}: {why}")


async def ollama_answers() -> bool:
    """Tell whether an engine answers where an Ollama usually does."""
    settings = EngineSettings(OLLAMA_URL, connect_s=_PROBE_S, query_s=_PROBE_S)
    return await _why_not(settings) == ""


async def _why_not(settings: EngineSettings) -> str:
    try:
        engine = await detect(settings)
    except EngineUnavailableError as error:
        return str(error).removeprefix(f"the engine at {settings.url} does not answer: ")
    await engine.close()
    return ""
