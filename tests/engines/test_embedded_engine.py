"""The embedded engine and the models that tests run on it."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from harness.engines import EngineProcess, wait_for
from harness.tiny_model import SHAPES, tiny_model, words

MODULE = "kvplane_cli.embedded_engine"


@pytest.mark.parametrize("preset", SHAPES)
def test_a_model_has_the_same_bytes_each_time(preset: str, tmp_path: Path) -> None:
    first = tiny_model(preset, folder=tmp_path / "a")
    second = tiny_model(preset, folder=tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.name]


def test_another_seed_gives_another_model_and_another_text(tmp_path: Path) -> None:
    first, second = (tiny_model("nano", seed=seed, folder=tmp_path) for seed in (1, 2))
    assert first.read_bytes() != second.read_bytes()
    assert words(20, seed=1) != words(20, seed=2)


async def test_it_comes_back_on_its_port_after_it_was_killed(
    start_engine: Callable[..., Awaitable[EngineProcess]], nano_model: Path
) -> None:
    engine = await start_engine(nano_model, slots=2)
    url, pid = engine.url, engine.pid
    await engine.kill()
    await engine.restart()
    assert (engine.url, await engine.busy_slots()) == (url, 0)
    assert engine.pid != pid
    assert [slot["n_ctx"] for slot in await engine.slots()] == [2048, 2048]


async def test_it_says_what_is_wrong_with_a_missing_model() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULE, "--model=nowhere.gguf", stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors == b"embedded engine: there is no model file nowhere.gguf\n"


async def test_it_ends_with_the_process_that_started_it(nano_model: Path) -> None:
    # A shell that starts it in the background, tells its process id, and is killed.
    script = f"{sys.executable} -m {MODULE} --parent=$$ --model={nano_model} & echo $! ; wait"
    shell = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=asyncio.subprocess.PIPE)
    assert shell.stdout is not None
    pid = int(await shell.stdout.readline())
    assert (await shell.stdout.readline()).startswith(b"READY ")
    shell.kill()
    await shell.wait()

    async def gone() -> bool:
        return not _running(pid)

    await wait_for(gone)


async def test_it_ends_with_status_0_when_told_to(nano_model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", MODULE, f"--model={nano_model}", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0


def _running(pid: int) -> bool:
    # A zombie, where nobody reaps orphans, has ended too.
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
