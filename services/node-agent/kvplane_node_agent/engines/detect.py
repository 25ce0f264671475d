"""Which engine answers at a URL."""

from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engines.base import Engine
from kvplane_node_agent.engines.llama_server import LlamaServer
from kvplane_node_agent.engines.ollama import Ollama
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.engines.transport import EngineHttp, Reply, unavailable

_PROPS = ("total_slots", "default_generation_settings")


async def detect(settings: EngineSettings) -> Engine:
    """Return the adapter for the engine at `settings.url`; the caller closes it.

    Raises EngineUnavailableError if nothing answers, if a model is still being loaded, or if what
    answers is neither Ollama nor llama-server.
    """
    http = EngineHttp(settings)
    try:
        version = await http.ask("/api/version")
        if version.status == 200 and "version" in version.json():
            return Ollama(settings)
        props = await http.ask("/props")
    finally:
        await http.close()
    if props.status == 200 and any(name in props.json() for name in _PROPS):
        return LlamaServer(settings)
    raise _neither(http.shown, props)


def _neither(shown: str, props: Reply) -> EngineUnavailableError:
    if props.status in (200, 404):
        return EngineUnavailableError(
            f"what answers at {shown} is neither Ollama (/api/version) nor llama-server (/props)"
        )
    return unavailable(shown, "/props", props)
