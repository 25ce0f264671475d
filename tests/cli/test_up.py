"""A real `kvplane up`, and the other commands against it."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.engines import wait_for
from kvplane_cli.layout import Addresses, Ports, Upstream, free_ports
from kvplane_cli.up import STOPPING, announcement

PROMPT = "please explain the cache of a node and the model " * 30


@dataclass(frozen=True, slots=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Up:
    """A running `kvplane up`, and a way to run commands against it."""

    def __init__(self, process: asyncio.subprocess.Process, base: int) -> None:
        self.process = process
        self._environment = {
            **os.environ,
            "KVPLANE_ROUTER": f"127.0.0.1:{base}",
            "KVPLANE_REGISTRY": f"127.0.0.1:{base + 1}",
            "KVPLANE_METASTORE": f"127.0.0.1:{base + 2}",
        }

    async def kvplane(self, *arguments: str, stdin: bytes = b"") -> Result:
        return await finished(await start(*arguments, environment=self._environment), stdin)

    def children(self) -> list[int]:
        # A child belongs to the thread that started it: the main one.
        pid = self.process.pid
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


async def start(
    *arguments: str, environment: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvplane_cli", *arguments),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env=environment,
    )


async def finished(process: asyncio.subprocess.Process, stdin: bytes = b"") -> Result:
    out, err = await asyncio.wait_for(process.communicate(stdin), 60)
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


@asynccontextmanager
async def running(model: Path, *arguments: str) -> AsyncIterator[Up]:
    base = free_base()
    data = tempfile.mkdtemp()
    flags = (f"--model={model}", f"--port-base={base}", f"--data-dir={data}")
    process = await start("up", *flags, *arguments)
    try:
        await announced(process)
        yield Up(process, base)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()
        shutil.rmtree(data)


async def announced(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    line = b""
    while b"kvplane explain" not in line:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if not line:
            raise AssertionError((await finished(process)).err)


def free_base() -> int:
    """Return a port whose followers are likely free as well: below those given out for port 0."""
    return 20_000 + free_ports(1)[0] % 600 * 20


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _state(pid) not in ("", "Z")]


def runs(pid: int, module: str) -> bool:
    return module in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


@pytest.fixture(scope="module")
async def up(nano_model: Path) -> AsyncIterator[Up]:
    async with running(nano_model, "--nodes=2") as up:
        yield up


async def test_generate_streams_text_and_says_where_it_came_from(up: Up) -> None:
    result = await up.kvplane("generate", "--max-tokens=8", "--temperature=0", "hello there")
    assert result.status == 0, result.err
    assert result.out.strip()
    assert "node-" in result.err
    assert "TTFT" in result.err


async def test_generate_in_json_is_one_object(up: Up) -> None:
    result = await up.kvplane("generate", "--json", "--max-tokens=4", "-", stdin=b"hello node")
    assert result.status == 0, result.err
    shown = result.json
    assert shown["text"]
    assert shown["evidence"] == "measured"
    assert shown["completion_tokens"] == 4


async def test_the_same_prompt_in_a_session_returns_to_its_cache(up: Up) -> None:
    arguments = ("generate", "--json", "--session=s", "--max-tokens=4", PROMPT)
    first = (await up.kvplane(*arguments)).json
    again = (await up.kvplane(*arguments)).json
    assert again["node"] == first["node"]
    assert again["stage"] == "SESSION"
    assert again["cached_tokens"] >= first["prompt_tokens"] - 1


async def test_what_is_remembered_is_listed_and_lives(up: Up) -> None:
    await up.kvplane("generate", "--session=listed", "--max-tokens=4", PROMPT)

    async def is_listed() -> bool:
        sessions = (await up.kvplane("sessions", "--json")).json
        return "listed" in [session["session"] for session in sessions]

    await wait_for(is_listed)
    entries = (await up.kvplane("cache", "--json")).json
    assert entries
    assert {entry["dead"] for entry in entries} == {""}
    assert {len(bytes.fromhex(entry["digest"])) for entry in entries} == {8}


async def test_the_latest_request_is_explained_with_what_was_measured(up: Up) -> None:
    asked = (await up.kvplane("generate", "--json", "--max-tokens=4", PROMPT)).json
    explained = (await up.kvplane("explain", "--json", asked["request_id"])).json
    assert explained["decision"]["node"] == asked["node"]
    assert {candidate["node"] for candidate in explained["decision"]["candidates"]} == {
        "node-1",
        "node-2",
    }
    assert explained["actual"]["cached_tokens"] == asked["cached_tokens"]
    assert (await up.kvplane("explain")).status == 0


async def test_a_routed_request_can_be_given_back(up: Up) -> None:
    shown = (await up.kvplane("route", "--json", "--release", "hello")).json
    assert shown["released"]
    assert shown["address"]
    active = [
        model["active"]
        for node in (await up.kvplane("nodes", "--json")).json
        for model in node["models"]
    ]
    assert sum(active) <= 1


async def test_a_drained_node_is_shown_and_comes_back(up: Up) -> None:
    assert (await up.kvplane("drain", "node-1")).status == 0
    nodes = (await up.kvplane("nodes", "--json")).json
    assert {node["node"]: node["draining"] for node in nodes} == {"node-1": True, "node-2": False}
    assert (await up.kvplane("generate", "--json", "--max-tokens=1", "hi")).json["node"] == "node-2"
    assert (await up.kvplane("undrain", "node-1")).status == 0


async def test_a_refusal_is_one_line_with_its_reason(up: Up) -> None:
    result = await up.kvplane("generate", "--model=nope", "hi")
    assert result.status == 1
    assert result.err.startswith("kvplane: MODEL_NOT_FOUND: ")
    assert result.err.count("\n") == 1


async def test_ctrl_c_breaks_off_an_answer_with_130(up: Up) -> None:
    process = await start(
        "generate", "--max-tokens=3000", "count with me", environment=up._environment
    )
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.read(1), 30)
    process.send_signal(signal.SIGINT)
    assert (await finished(process)).status == 130

    async def is_idle() -> bool:
        nodes = (await up.kvplane("nodes", "--json")).json
        return not any(model["active"] for node in nodes for model in node["models"])

    await wait_for(is_idle)


async def test_a_second_cluster_on_the_same_ports_is_refused(up: Up, nano_model: Path) -> None:
    base = up._environment["KVPLANE_ROUTER"].rpartition(":")[2]
    result = await finished(await start("up", f"--model={nano_model}", f"--port-base={base}"))
    assert result.status == 1
    assert f"cannot listen on 127.0.0.1:{base}" in result.err


async def test_ctrl_c_stops_everything(nano_model: Path) -> None:
    async with running(nano_model, "--nodes=1") as up:
        children = up.children()
        assert len(children) == 5
        up.process.send_signal(signal.SIGINT)
        result = await finished(up.process)
    assert (result.status, result.err) == (0, f"{STOPPING}\nstopped\n")
    assert alive(children) == []


async def test_a_second_ctrl_c_waits_for_no_answer(nano_model: Path) -> None:
    async with running(nano_model, "--nodes=1") as up:
        children = up.children()
        router = next(pid for pid in children if runs(pid, "kvplane_router"))
        os.kill(router, signal.SIGSTOP)  # It does not end when it is told to.
        up.process.send_signal(signal.SIGINT)
        assert up.process.stderr is not None
        told = await asyncio.wait_for(up.process.stderr.readline(), 60)
        up.process.send_signal(signal.SIGINT)
        result = await finished(up.process)
    assert (result.status, told.decode(), result.err) == (0, f"{STOPPING}\n", "stopped\n")
    assert alive(children) == []


async def test_a_named_engine_that_does_not_answer_is_told_before_anything_starts() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    result = await finished(await start("up", f"--llama-server={url}"))
    assert result.status == 1
    assert result.err.startswith(f"kvplane: no engine answers at {url}: Cannot connect")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("keep", [False, True], ids=["nowhere", "data dir"])
async def test_a_failed_start_leaves_only_what_was_asked_for(tmp_path: Path, keep: bool) -> None:
    broken, data, temporary = tmp_path / "broken.gguf", tmp_path / "data", tmp_path / "tmp"
    broken.write_bytes(b"no model")
    temporary.mkdir()
    flags = (f"--model={broken}", f"--port-base={free_base()}")
    kept = (f"--data-dir={data}",) if keep else ()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    result = await finished(await start("up", *flags, *kept, environment=environment))
    assert result.status == 1
    assert "engine-1 ended before it could serve. The end of its log:" in result.err
    assert (f"The logs are in {data}." in result.err, data.exists()) == (keep, keep)
    assert list(temporary.iterdir()) == []


def test_what_can_be_copied_is_one_command_a_line() -> None:
    engines = [Upstream("http://" + "long." * 30 + "example:1")]
    lines = list(announcement(Addresses.of(Ports.from_base(21_000, 1)), engines))
    assert lines[3] == f"node-1     127.0.0.1:21010  {engines[0].url}"
    assert lines[5:8] == [
        "  export KVPLANE_ROUTER=127.0.0.1:21000",
        "  export KVPLANE_REGISTRY=127.0.0.1:21001",
        "  export KVPLANE_METASTORE=127.0.0.1:21002",
    ]


async def test_a_service_that_dies_is_named_and_everything_stops(nano_model: Path) -> None:
    async with running(nano_model, "--nodes=1") as up:
        children = up.children()
        os.kill(next(pid for pid in children if runs(pid, "kvplane_registry")), signal.SIGKILL)
        result = await finished(up.process)
    assert result.status == 1
    assert "registry ended unexpectedly" in result.err
    assert alive(children) == []


async def test_no_process_outlives_a_killed_cluster(nano_model: Path) -> None:
    async with running(nano_model, "--nodes=1") as up:
        children = up.children()
        up.process.kill()
        await up.process.wait()

    async def are_gone() -> bool:
        return not alive(children)

    await wait_for(are_gone)
