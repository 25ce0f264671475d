"""llama.cpp's HTTP server."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import structlog

from kvplane_common.errors import ModelNotFoundError
from kvplane_common.requests import model_name
from kvplane_node_agent.engines.answer import answer
from kvplane_node_agent.engines.base import EngineModel, EngineRequest, Finished, Piece
from kvplane_node_agent.engines.figures import Figures
from kvplane_node_agent.engines.llama_wire import (
    LlamaDecoder,
    listed_names,
    refusal,
    request_for,
)
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.engines.transport import EngineHttp
from kvplane_node_agent.engines.wire import Told
from kvplane_node_agent.geometry import kv_bytes_per_token
from kvplane_node_agent.gguf_file import read_metadata

_log = structlog.get_logger(__name__)


class LlamaServer:
    """A llama-server with one model. Must be made where an event loop runs.

    Only routes are polled that do not wake a server that has gone to sleep.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._http = EngineHttp(settings)
        self._names: frozenset[str] = frozenset()
        self._kv_bytes: dict[str, float | None] = {}

    async def describe(self) -> str:
        """Return "llama-server" and its build."""
        build = Told("/props", await self._http.read("/props")).text("build_info")
        return f"llama-server {build}" if build else "llama-server"

    async def models(self) -> Sequence[EngineModel]:
        """Return its one model, under the name that the server gives it."""
        props = await self._http.read("/props")
        told = Told("/props", props)
        name = await self._learn_names(told)
        slot = Figures(props.get("default_generation_settings"))
        model = EngineModel(
            name=name,
            loaded=not props.get("is_sleeping", False),
            slots=told.figures.count("total_slots") or 1,
            context_tokens=slot.count("n_ctx") or None,
            kv_bytes_per_token=await self._kv_bytes_per_token(told.text("model_path")),
        )
        return (model,)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Piece | Finished]:
        """Run a prompt: pieces of text, then one Finished. See Engine.generate."""
        if request.model not in self._names:
            # The server answers to any name; only what it was started with is its model.
            await self.models()
        if request.model not in self._names:
            raise ModelNotFoundError(
                f"the engine at {self._http.shown} has no model {request.model!r}; "
                f"it has {', '.join(sorted(self._names))}"
            )
        path, body = request_for(request)
        async with aclosing(answer(self._http, path, body, LlamaDecoder(), refusal)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._http.close()

    async def _learn_names(self, props: Told) -> str:
        names = listed_names(await self._http.read("/v1/models"), props)
        self._names = frozenset({*names, *map(model_name, names)})
        return model_name(names[0])

    async def _kv_bytes_per_token(self, path: str) -> float | None:
        if self._settings.kv_bytes_per_token is not None:
            return self._settings.kv_bytes_per_token
        if path not in self._kv_bytes:
            self._kv_bytes[path] = await asyncio.to_thread(
                _geometry, Path(path), self._settings.cache_type
            )
        return self._kv_bytes[path]


def _geometry(path: Path, cache_type: str) -> float | None:
    # The path is the engine's: on another machine or in another container there is no such file.
    try:
        if not path.is_absolute() or not path.is_file():
            return None
        return kv_bytes_per_token(read_metadata(path), cache_type)
    except (OSError, ValueError) as error:
        _log.warning("cannot read the model's geometry", model_path=str(path), error=str(error))
        return None
