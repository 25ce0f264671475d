import asyncio
from pathlib import Path

import pytest

from kvplane_cli.layout import free_ports
from kvplane_cli.processes import Child, is_serving
from kvplane_cli.shell import CliError

ENGINE = "kvplane_cli.embedded_engine"


async def _never(child: Child) -> bool:
    return False


async def _ready(child: Child) -> bool:
    return "READY " in await child.output()


async def test_a_process_that_ends_early_is_reported_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    child = Child("engine-1", [ENGINE, "--model=gone.gguf"], tmp_path / "log", _never)
    await child.start()
    with pytest.raises(CliError) as raised:
        await child.wait_ready(30)
    assert "engine-1 ended before it could serve" in str(raised.value)
    assert "there is no model file gone.gguf" in str(raised.value)


async def test_a_process_that_does_not_get_ready_is_reported_and_stops(
    tmp_path: Path, nano_model: Path
) -> None:
    child = Child("engine-1", [ENGINE, f"--model={nano_model}"], tmp_path / "log", _never)
    await child.start()
    with pytest.raises(CliError, match=r"could not serve within 0\.1 s"):
        await child.wait_ready(0.1)
    await child.stop(10)
    assert not child.running


async def test_a_killed_process_starts_again_and_only_its_new_output_counts(
    tmp_path: Path, nano_model: Path
) -> None:
    child = Child("engine-1", [ENGINE, f"--model={nano_model}"], tmp_path / "log", _ready)
    await child.start()
    await child.wait_ready(30)
    first, pid = await child.output(), child.pid
    await child.kill()
    await child.start()
    assert child.pid != pid
    await child.wait_ready(30)
    assert (await child.output()).count("READY") == 1
    assert child.log.read_text().startswith(first)
    await child.stop(10)


async def test_stopping_what_has_ended_or_never_started_is_no_error(tmp_path: Path) -> None:
    child = Child("engine-1", [ENGINE, "--model=gone.gguf"], tmp_path / "log", _never)
    await child.stop(1)
    await child.start()
    await asyncio.wait_for(child.ended(), 30)
    await child.stop(1)
    await child.kill()


async def test_an_address_where_nobody_answers_is_not_serving() -> None:
    assert not await is_serving(f"127.0.0.1:{free_ports(1)[0]}")
