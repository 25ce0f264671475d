"""Turning messages into rows, and rows into tables or JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich import box
from rich.table import Table

from kvplane_cli.shell import stdout

UNKNOWN = "unknown"

Row = Mapping[str, Any]
"""A JSON object; what is unknown is None."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title and what it shows of a row."""

    title: str
    cell: Callable[[Row], str]
    right: bool = False
    wraps: bool = False
    """Whether it gives way where the table is too wide; the others stay whole."""


def text(title: str, key: str, *, wraps: bool = False) -> Column:
    """Return a column that shows a row's `key` as it is."""
    return Column(title, lambda row: words(row[key]), wraps=wraps)


def count(title: str, key: str) -> Column:
    """Return a column that shows a row's `key` as a number."""
    return Column(title, lambda row: number(row[key]), right=True)


def show(rows: Sequence[Row], columns: Sequence[Column], *, as_json: bool, empty: str) -> None:
    """Print `rows` as one JSON array or as a table; `empty` is said instead of a bare table."""
    if as_json:
        show_json(rows)
    elif not rows:
        typer.echo(empty, err=True)
    else:
        stdout().print(table(rows, columns))


def show_json(value: object) -> None:
    """Print one JSON value on stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


def table(rows: Sequence[Row], columns: Sequence[Column], title: str | None = None) -> Table:
    """Return `rows` as a table."""
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title,
        title_justify="left",
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        made.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.wraps,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(column.cell(row) for column in columns))
    return made


def known(message: Message, field: str) -> Any:
    """Return an optional field, or None where it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def name_of(kind: EnumDescriptor, value: int) -> str:
    """Return an enum value's name without the prefix that all of its kind share.

    A value that only newer peers know gives its number.
    """
    named = kind.values_by_number.get(value)
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return named.name.removeprefix(prefix) if named else str(value)


def kind_of(kind: EnumDescriptor, value: int) -> str | None:
    """Return an enum value's name as `name_of` does, in lower case, or None for the unspecified."""
    return name_of(kind, value).lower() if value else None


def number(value: float | None) -> str:
    """Return a count or a measure for people, with three digits where it is small."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def milliseconds(value: float | None) -> str:
    """Return a time for people, with its unit where it is known."""
    return UNKNOWN if value is None else f"{number(value)} ms"


def words(value: object) -> str:
    """Return a value for people."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def iso(moment: Timestamp) -> str | None:
    """Return a time as ISO 8601 in UTC, or None for one that was never set."""
    return moment.ToJsonString() if moment.seconds else None


def ago(now_ms: int, moment: str | None) -> str:
    """Return how long ago, or in how long, a time from `iso` is."""
    if moment is None:
        return UNKNOWN
    parsed = Timestamp()
    parsed.FromJsonString(moment)
    seconds = (now_ms - parsed.ToMilliseconds()) / 1000
    return f"{_span(seconds)} ago" if seconds >= 0 else f"in {_span(-seconds)}"


def _span(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
