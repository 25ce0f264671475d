"""What every command shares: its consoles, how it runs, and how it fails."""

import asyncio
import sys
from collections.abc import Coroutine
from functools import partial
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console

_PIPED_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, where nobody told a width."""

# What is shown comes from elsewhere: brackets and colons in it mean nothing.
_plain = partial(Console, markup=False, emoji=False, highlight=False)

_T = TypeVar("_T")


class CliError(Exception):
    """The command cannot do what was asked; the message is for the person who asked."""


def stdout() -> Console:
    """Return the console for results."""
    width = None if sys.stdout.isatty() else _PIPED_WIDTH
    return _plain(width=width)


def stderr() -> Console:
    """Return the console for what is said beside the results."""
    return _plain(stderr=True, soft_wrap=True)


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a command's coroutine; exit with 1 after a CliError and with 130 after Ctrl-C."""
    try:
        return asyncio.run(main)
    except CliError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def fail(message: str) -> NoReturn:
    """Say on stderr what went wrong, and exit with status 1."""
    typer.echo(f"kvplane: {message}", err=True)
    raise typer.Exit(1)
