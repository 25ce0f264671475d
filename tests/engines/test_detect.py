"""Which engine answers at a URL."""

from pathlib import Path

import pytest

from harness.engines import EngineProcess
from harness.ollama_standin import OllamaStandIn
from harness.raw_http import http, raw_http
from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engines.detect import detect
from kvplane_node_agent.engines.llama_server import LlamaServer
from kvplane_node_agent.engines.ollama import Ollama
from kvplane_node_agent.engines.settings import EngineSettings

LOADING = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'


async def test_llama_server_is_told_by_its_props(nano_engine: EngineProcess) -> None:
    engine = await detect(EngineSettings(url=nano_engine.url))
    assert isinstance(engine, LlamaServer)
    await engine.close()


async def test_ollama_is_told_by_its_version(nano_model: Path) -> None:
    async with OllamaStandIn({"tiny:latest": nano_model}).running() as standin:
        engine = await detect(EngineSettings(url=standin.url))
        assert isinstance(engine, Ollama)
        await engine.close()


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (http(b"404 page not found", "404 Not Found"), "neither Ollama"),
        (http(b"<html>"), "neither Ollama"),
        (http(b'{"version": 3}', "401 Unauthorized"), "status 401"),
        (http(LOADING, "503 Service Unavailable"), "Loading model"),
        (b"", "does not answer"),
    ],
    ids=["another API", "a web page", "a locked door", "a loading model", "nothing"],
)
async def test_anything_else_is_unavailable_and_says_why(reply: bytes, says: str) -> None:
    async with raw_http([reply]) as engine:
        with pytest.raises(EngineUnavailableError, match=says):
            await detect(EngineSettings(url=engine.url))


async def test_a_closed_port_is_unavailable() -> None:
    with pytest.raises(EngineUnavailableError, match="does not answer"):
        await detect(EngineSettings(url="http://127.0.0.1:1"))
