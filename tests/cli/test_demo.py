"""The demo itself, on a model whose prefill takes a second or two."""

import asyncio
import json
import sys
from pathlib import Path


async def test_the_demo_holds_all_that_it_promises(mini_model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvplane_cli", "demo", "--json", f"--model={mini_model}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    shown = json.loads(out)
    assert all(check["holds"] for check in shown["checks"])
    assert [request["stage"] for request in shown["requests"]] == [
        *("MISS", "SESSION", "SESSION", "EXACT", "PREFIX", "MISS", "SESSION"),
    ]
    assert shown["metastore_restart"]["before"] == shown["metastore_restart"]["after"]
