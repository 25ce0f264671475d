"""Ollama, by its own API: its OpenAI routes hide errors within a stream."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from kvplane_common.requests import model_name
from kvplane_node_agent.engines.answer import answer
from kvplane_node_agent.engines.base import EngineModel, EngineRequest, Finished, Piece
from kvplane_node_agent.engines.ollama_wire import (
    ListedModel,
    OllamaDecoder,
    listed_models,
    loaded_contexts,
    metadata_of,
    refusal,
    request_for,
)
from kvplane_node_agent.engines.settings import EngineSettings
from kvplane_node_agent.engines.transport import EngineHttp, unavailable
from kvplane_node_agent.engines.wire import Told, parse_object
from kvplane_node_agent.geometry import context_tokens, kv_bytes_per_token


class Ollama:
    """An Ollama server. Must be made where an event loop runs.

    Models are named without the tag ":latest"; `generate` takes both names.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._http = EngineHttp(settings)
        self._version = ""
        self._metadata: dict[str, Mapping[str, object]] = {}

    async def describe(self) -> str:
        """Return "ollama" and its version."""
        told = Told("/api/version", await self._http.read("/api/version"))
        self._version = told.text("version")
        return f"ollama {self._version}"

    async def models(self) -> Sequence[EngineModel]:
        """Return the models on this machine that can answer, loaded or not."""
        listed = listed_models(await self._http.read("/api/tags"))
        contexts = loaded_contexts(await self._http.read("/api/ps"))
        return [await self._model(model, contexts) for model in listed]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Piece | Finished]:
        """Run a prompt: pieces of text, then one Finished. See Engine.generate."""
        if not self._version:
            await self.describe()
        path, body = request_for(request, self._settings.context_tokens)
        decoder = OllamaDecoder(self._version)
        async with aclosing(answer(self._http, path, body, decoder, refusal)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        """Close the connections to Ollama."""
        await self._http.close()

    async def _model(self, listed: ListedModel, contexts: Mapping[str, int | None]) -> EngineModel:
        name = listed.name
        metadata = await self._metadata_of(listed)
        own = self._settings.kv_bytes_per_token
        worked_out = kv_bytes_per_token(metadata, self._settings.cache_type)
        # The engine never gives more context than the model was trained for.
        asked = self._settings.context_tokens or contexts.get(name)
        known = [tokens for tokens in (asked, context_tokens(metadata)) if tokens]
        return EngineModel(
            name=model_name(name),
            loaded=name in contexts,
            slots=self._settings.slots or 1,
            context_tokens=min(known) if asked else None,
            kv_bytes_per_token=worked_out if own is None else own,
        )

    async def _metadata_of(self, listed: ListedModel) -> Mapping[str, object]:
        """Return the model's GGUF keys; told once, as a digest never changes its meaning."""
        key = listed.digest or listed.name
        if key not in self._metadata:
            reply = await self._http.ask("/api/show", {"model": listed.name})
            if reply.status == 404:
                # It was removed since it was listed.
                return {}
            if reply.status != 200:
                raise unavailable(self._http.shown, "/api/show", reply)
            self._metadata[key] = metadata_of(parse_object(reply.body))
        return self._metadata[key]
