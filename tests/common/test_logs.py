"""What is written to the log, by a process of its own."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, structlog
from kvplane_common.logs import configure_logs

def answer(prompt):
    raise ValueError("out of ideas")

configure_logs("kvplane-probe", "info", human=sys.argv[1] == "text")
structlog.get_logger("a").info("listening", port=1)
structlog.get_logger("a").debug("too fine")
logging.getLogger("library").warning("from a library")
try:
    answer(" ".join(["what nobody", "else may read"]))
except ValueError as error:
    structlog.get_logger("a").error("unexpected", exc_info=error)
"""


def _log(style: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, style], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("style", ["json", "text"])
def test_a_traceback_shows_no_variables(style: str) -> None:
    log = _log(style)
    assert "out of ideas" in log
    assert "what nobody else may read" not in log


def test_each_line_is_an_object_that_names_the_service() -> None:
    lines = [json.loads(line) for line in _log("json").splitlines()]
    assert [line["event"] for line in lines] == ["listening", "from a library", "unexpected"]
    assert {line["service"] for line in lines} == {"kvplane-probe"}
    assert lines[0]["port"] == 1
    assert "ValueError" in lines[2]["exception"]
