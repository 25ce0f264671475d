"""What the engines tell of themselves, well-formed and not."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from harness.raw_http import http, raw_http
from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engines.base import Engine
from kvplane_node_agent.engines.llama_server import LlamaServer
from kvplane_node_agent.engines.ollama import Ollama
from kvplane_node_agent.engines.settings import EngineSettings

NOT_FOUND = "404 Not Found"
FAILED = "500 Internal Server Error"
MINI = {"models": [{"name": "mini:latest", "digest": "d"}]}
NONE = {"models": None}
PROPS = {"model_path": "/nowhere/mini.gguf"}


def reply(value: Any, status: str = "200 OK") -> bytes:
    return http(json.dumps(value).encode(), status)


@asynccontextmanager
async def ollama(answers: Sequence[bytes]) -> AsyncIterator[Engine]:
    async with raw_http(answers) as raw:
        engine = Ollama(EngineSettings(url=raw.url))
        yield engine
        await engine.close()


@asynccontextmanager
async def llama_server(answers: Sequence[bytes]) -> AsyncIterator[Engine]:
    async with raw_http(answers) as raw:
        engine = LlamaServer(EngineSettings(url=raw.url))
        yield engine
        await engine.close()


@pytest.mark.parametrize(
    ("told", "path"),
    [
        ([[]], "/api/tags"),
        ([{"models": {"name": "mini"}}], "/api/tags"),
        ([{"models": "mini"}], "/api/tags"),
        ([{"models": ["mini"]}], "/api/tags"),
        ([{"models": [{"model": "x"}]}], "/api/tags"),
        ([{"models": [{"name": 7}]}], "/api/tags"),
        ([{"models": [{"name": "\ud800"}]}], "/api/tags"),
        ([{"models": [{"name": ["x"]}]}], "/api/tags"),
        ([{"models": [{"name": "x", "digest": {}}]}], "/api/tags"),
        ([{"models": [{"name": "x", "capabilities": 7}]}], "/api/tags"),
        ([{"models": [{"name": "x", "capabilities": [[]]}]}], "/api/tags"),
        ([MINI, {"models": [None]}], "/api/ps"),
        ([MINI, {"models": [{"model": "x"}]}], "/api/ps"),
        ([MINI, NONE, []], "/api/show"),
        ([MINI, NONE, {"model_info": [1]}], "/api/show"),
    ],
    ids=str,
)
async def test_an_ollama_that_is_not_understood_is_unavailable(told: list[Any], path: str) -> None:
    async with ollama([reply(one) for one in told]) as engine:
        with pytest.raises(EngineUnavailableError, match=f"{path} in a way that is not understood"):
            await engine.models()


@pytest.mark.parametrize(
    ("told", "path"),
    [
        ([[]], "/props"),
        ([{"model_path": 7}], "/props"),
        ([{**PROPS, "model_alias": ["x"]}, {}], "/props"),
        ([PROPS, []], "/v1/models"),
        ([PROPS, {"data": {}}], "/v1/models"),
        ([PROPS, {"data": ["mini"]}], "/v1/models"),
        ([PROPS, {"data": [{"id": 7}]}], "/v1/models"),
        ([PROPS, {"data": [{"id": "mini", "aliases": "x"}]}], "/v1/models"),
        ([PROPS, {"data": [{"id": "mini", "aliases": [7]}]}], "/v1/models"),
        ([{}, {}], "/v1/models"),
    ],
    ids=str,
)
async def test_a_llama_server_that_is_not_understood_is_unavailable(
    told: list[Any], path: str
) -> None:
    async with llama_server([reply(one) for one in told]) as engine:
        with pytest.raises(EngineUnavailableError, match=f"{path} in a way that is not understood"):
            await engine.models()


async def test_an_odd_number_is_unknown() -> None:
    running = {"models": [{"name": "mini:latest", "context_length": "4096"}]}
    show = {"model_info": {"general.architecture": "llama", "llama.block_count": 1e999}}
    async with ollama([reply(MINI), reply(running), reply(show)]) as engine:
        (model,) = await engine.models()
    assert (model.loaded, model.context_tokens, model.kv_bytes_per_token) == (True, None, None)
    props = {**PROPS, "total_slots": "2", "default_generation_settings": [1]}
    async with llama_server([reply(props), reply({})]) as engine:
        (model,) = await engine.models()
    assert (model.slots, model.context_tokens) == (1, None)


async def test_llama_servers_names_lose_the_tag_latest_too() -> None:
    listing = {"data": [{"id": "mini:latest", "aliases": ["small:latest"]}]}
    async with llama_server([reply(PROPS), reply(listing)]) as engine:
        (model,) = await engine.models()
    assert model.name == "mini"


SHOW = {"model_info": {"general.architecture": "llama", "llama.context_length": 512}}


async def test_a_model_is_asked_about_until_its_answer_is_there_and_then_no_more() -> None:
    polls = [
        [reply(MINI), reply(NONE), reply({"error": "busy"}, FAILED)],
        [reply(MINI), reply(NONE), reply({"error": "gone"}, NOT_FOUND)],
        [reply(MINI), reply(NONE), reply(SHOW)],
        [reply(MINI), reply(NONE)],
    ]
    async with raw_http([one for poll in polls for one in poll]) as raw:
        engine = Ollama(EngineSettings(url=raw.url, context_tokens=1024))
        with pytest.raises(EngineUnavailableError, match="/api/show with status 500"):
            await engine.models()
        contexts = [(await engine.models())[0].context_tokens for _ in range(3)]
        await engine.close()
    assert contexts == [1024, 512, 512]
    assert raw.paths.count("/api/show") == 3


async def test_a_model_file_that_cannot_even_be_looked_for_has_no_known_geometry() -> None:
    props = {"model_path": f"/{'x' * 5000}/mini.gguf"}
    async with llama_server([reply(props), reply({"data": [{"id": "mini"}]})]) as engine:
        (model,) = await engine.models()
    assert (model.name, model.kv_bytes_per_token) == ("mini", None)
