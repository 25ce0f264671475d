"""The metastore as a process: killed, stopped, started twice, and configured wrongly."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvplane_common.channels import dial
from kvplane_common.metastore import MetastoreClient, put

PROGRAM = (sys.executable, "-m", "kvplane_metastore")


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *PROGRAM, *arguments, stderr=asyncio.subprocess.PIPE
    )


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(30):
        _, written = await process.communicate()
    assert process.returncode is not None
    return process.returncode, written.decode()


@asynccontextmanager
async def running(data_dir: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await start("--listen", "127.0.0.1:0", "--data-dir", str(data_dir))
    try:
        yield process, await listening(process)
    finally:
        if process.returncode is None:
            process.kill()
        await ended(process)


async def listening(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for line in process.stderr:
            told = json.loads(line)
            if told["event"] == "listening":
                return str(told["address"])
    raise AssertionError("it ended without listening")


async def test_a_process_killed_between_two_acknowledged_writes_loses_neither(
    tmp_path: Path,
) -> None:
    for key in (b"k/1", b"k/2"):
        async with running(tmp_path) as (process, address), dial(address) as channel:
            await MetastoreClient(channel).write([put(key, b"kept")])
            process.kill()
            assert await process.wait() == -signal.SIGKILL
    async with running(tmp_path) as (_, address), dial(address) as channel:
        kvs, revision = await MetastoreClient(channel).range(b"k/")
        assert [(kv.key, kv.value, kv.mod_revision) for kv in kvs] == [
            (b"k/1", b"kept", 1),
            (b"k/2", b"kept", 2),
        ]
        assert revision == 2


async def test_a_second_process_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, address):
        second = await start("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path))
        status, written = await ended(second)
        assert status == 1
        assert f"kvplane-metastore: {tmp_path} is in use by another metastore" in written
        async with dial(address) as channel:
            await MetastoreClient(channel).write([put(b"k", b"")])
        process.send_signal(signal.SIGTERM)
        status, written = await ended(process)
        assert status == 0
        assert json.loads(written.splitlines()[-1])["event"] == "stopped"


async def test_a_damaged_log_is_told_and_not_served(tmp_path: Path) -> None:
    (tmp_path / "metastore.log").write_bytes(b"")
    status, written = await ended(await start("--data-dir", str(tmp_path)))
    assert status == 1
    assert "kvplane-metastore: metastore.log is damaged at byte 0" in written


WRONG = {
    "an unknown key in the file": ("lisen = 'x'", [], "unknown key 'lisen'; known keys are"),
    "a file that is no TOML": ("listen =", [], "cannot read"),
    "a bad value in the file": ("drain_s = -1", [], "--drain-s (or KVPLANE_METASTORE_DRAIN_S"),
    "a bad flag": ("", ["--listen", "nowhere"], "--listen (or KVPLANE_METASTORE_LISTEN"),
    "an unknown flag": ("", ["--lisen", "x"], "unrecognized arguments: --lisen"),
}


@pytest.mark.parametrize(("toml", "flags", "why"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_setting_is_named(
    tmp_path: Path, toml: str, flags: list[str], why: str
) -> None:
    path = tmp_path / "metastore.toml"
    path.write_text(toml)
    status, written = await ended(await start("--config", str(path), *flags))
    assert status == 2
    assert why in written
