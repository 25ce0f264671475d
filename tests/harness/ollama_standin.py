"""A stand-in for Ollama, for tests only: its API over a real engine.

Ollama itself is a front of llama.cpp's server, so counts, cache and slots here are the ones that it
would have. It answers as the releases do that it is told to be: before 0.4 and in 0.30.0 only
uncached prompt tokens are counted, and from 0.33.3 on cached ones are reported.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
from aiohttp import web

from harness.engines import EngineProcess
from harness.ollama_lines import Asked, Faults, answer

DEFAULT_CONTEXT = 4096


@dataclass
class OllamaStandIn:
    """Serves GGUF files by Ollama's names while its `running` block runs."""

    models: Mapping[str, Path]
    version: str = "0.33.3"
    counts_as: str = ""
    """The version whose way of counting it has, if not that of `version`."""
    parallel: int = 1
    cache_ram_mb: int = 8192
    more_tags: list[dict[str, Any]] = field(default_factory=list)
    """Listed as well, such as a model that runs in a cloud."""
    faults: Faults = field(default_factory=Faults)
    url: str = ""
    loads: int = 0
    """How often an engine was started."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of the requests for answers."""
    engines: dict[str, tuple[EngineProcess, int]] = field(default_factory=dict)
    """The loaded models' engines, and their contexts."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        # Requests wait here without limit, as they do at a loaded model of the real one.
        self._free = asyncio.Semaphore(self.parallel)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["OllamaStandIn"]:
        """Answer on a free port."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._root),
                web.get("/api/version", self._version),
                web.get("/api/tags", self._tags),
                web.get("/api/ps", self._ps),
                web.post("/api/show", self._show),
                web.post("/api/chat", self._answer),
                web.post("/api/generate", self._answer),
            ]
        )
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
            for name in list(self.engines):
                await self.unload(name)

    async def _root(self, request: web.Request) -> web.Response:
        return web.Response(text="Ollama is running")

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _tags(self, request: web.Request) -> web.Response:
        listed = [self._tag(name) | {"capabilities": ["completion"]} for name in self.models]
        return web.json_response({"models": listed + self.more_tags})

    async def _ps(self, request: web.Request) -> web.Response:
        loaded = [
            self._tag(name) | {"size_vram": 0, "context_length": context}
            for name, (_, context) in self.engines.items()
        ]
        return web.json_response({"models": loaded})

    def _tag(self, name: str) -> dict[str, Any]:
        path = self.models[name]
        details = {"format": "gguf", "family": "llama", "families": ["llama"]}
        size, digest = path.stat().st_size, path.name.encode().hex()
        return {"name": name, "model": name, "size": size, "digest": digest, "details": details}

    async def _show(self, request: web.Request) -> web.Response:
        name = self._name((await request.json())["model"])
        fields = gguf.GGUFReader(self.models[name]).fields.values()
        info = {
            f.name: f.contents() for f in fields if not f.name.startswith(("GGUF", "tokenizer"))
        }
        return web.json_response({"model_info": info, "capabilities": ["completion"]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        begun_ns = time.monotonic_ns()
        try:
            body = await request.json()
        except json.JSONDecodeError:
            return _error(400, "invalid character 'b' looking for beginning of object key string")
        if not body.get("model"):
            return _error(400, "model is required")
        if self._name(body["model"]) not in self.models:
            return _error(404, f"model '{body['model']}' not found")
        if self.faults.refuse:
            return _error(*self.faults.refuse)
        self.seen.append(body)
        engine = await self._loaded(body)
        load_ns = time.monotonic_ns() - begun_ns
        async with self._free:
            version = self.counts_as or self.version
            asked = Asked(body, request.path == "/api/chat", version, begun_ns, load_ns)
            async with aclosing(answer(engine, asked, self.faults)) as lines:
                response = await _send(request, lines)
        if body.get("keep_alive") == 0:
            await self.unload(self._name(body["model"]))
        return response

    async def _loaded(self, body: Mapping[str, Any]) -> EngineProcess:
        name = self._name(body["model"])
        async with self._lock:
            context = body.get("options", {}).get("num_ctx")
            if name in self.engines and context in (None, self.engines[name][1]):
                return self.engines[name][0]
            await self.unload(name)
            context = context or DEFAULT_CONTEXT
            engine = EngineProcess(
                self.models[name],
                slots=self.parallel,
                context_tokens=context * self.parallel,
                cache_ram_mb=self.cache_ram_mb,
            )
            await engine.start()
            self.loads += 1
            self.engines[name] = engine, context
            return engine

    async def unload(self, name: str) -> None:
        """End a model's engine, as a request with keep_alive 0 does."""
        if name in self.engines:
            # It kills its child: slots and host RAM cache end together.
            await self.engines.pop(name)[0].kill()

    def _name(self, name: str) -> str:
        return name if ":" in name else f"{name}:latest"


async def _send(request: web.Request, lines: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    """Send lines as they come; an error before the first of them has a status of its own."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    async for line in lines:
        if "status" in line and not response.prepared:
            return _error(line["status"], line["error"])
        if not response.prepared:
            await response.prepare(request)
        await response.write(json.dumps(line).encode() + b"\n")
    if not response.prepared:
        await response.prepare(request)
    return response


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
