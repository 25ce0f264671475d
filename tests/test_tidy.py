"""The size that keeps code readable, held by a test."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
FOLDERS = ("services", "cli", "tests")


def _sources() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = function.body[1] if is_docstring and len(function.body) > 1 else first
    return (function.end_lineno or start.lineno) - start.lineno + 1


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in _sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = [
        str(path.relative_to(ROOT))
        for path in _sources()
        if path.read_text().count("\n") > MAX_FILE_LINES
    ]
    assert not long
