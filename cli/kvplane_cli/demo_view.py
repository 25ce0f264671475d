"""Showing the demo: a row a request as it ends, then what was saved and what held."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.live import Live
from rich.table import Table

from kvplane_cli.demo_checks import Check, Report, Turn
from kvplane_cli.render import Column, Row, count, number, table, text
from kvplane_cli.shell import stdout
from kvplane_common.keys import CACHE_PREFIX, SESSION_PREFIX


def _cached(row: Row) -> str:
    inferred = "" if row["evidence"] in (None, "measured") else f" ({row['evidence']})"
    return f"{number(row['cached_tokens'])}{inferred}"


_COLUMNS = (
    text("request", "what"),
    text("stage", "stage"),
    text("node", "node"),
    count("prompt tokens", "prompt_tokens"),
    Column("cached", _cached, right=True),
    Column("TTFT ms", lambda row: f"{number(row['ttft_ms'])}", right=True),
)


class Turns:
    """The requests so far; `live` shows them as they come, where somebody watches."""

    def __init__(self, live: Live | None) -> None:
        self._live = live
        self._rows: list[Row] = []

    def begin(self, what: str) -> None:
        """Show that a request is under way."""
        self._show(f"asking: {what}")

    def end(self, turn: Turn) -> None:
        """Show what came of it."""
        self._rows.append(turn.to_json())
        self._show(None)

    def table(self) -> Table:
        """Return all that have ended."""
        return table(self._rows, _COLUMNS)

    def _show(self, caption: str | None) -> None:
        if self._live is not None:
            shown = self.table()
            shown.caption = caption
            self._live.update(shown, refresh=True)


@contextmanager
def shown_turns(*, quiet: bool) -> Iterator[Turns]:
    """Give a place to tell of requests; it shows them in one table, unless `quiet`."""
    console = stdout()
    if quiet or not console.is_terminal:
        turns = Turns(None)
        yield turns
        if not quiet:
            console.print(turns.table())
        return
    with Live(console=console, auto_refresh=False) as live:
        yield Turns(live)


def show_report(report: Report, found: Sequence[Check]) -> None:
    """Print what the cache saved, what outlived the metastore, and every check."""
    say = stdout().print
    cold, warm = report.turns[0].answer, report.again.answer
    say(
        f"Same prompt, {number(cold.prompt_tokens)} tokens: first token after "
        f"{number(cold.ttft_ms)} ms cold, {number(warm.ttft_ms)} ms warm: "
        f"{number(report.speedup)} times sooner."
    )
    say(
        "Metastore killed with SIGKILL and started again: "
        f"{_entries(report.keys_before)} before, {_entries(report.keys_after)} after.\n"
    )
    for check in found:
        say(*(("✓", check.what) if check.holds else ("✗", check.what, f"(found {check.found})")))


def _entries(keys: frozenset[bytes]) -> str:
    cached, sessions = _count(keys, CACHE_PREFIX), _count(keys, SESSION_PREFIX)
    return f"{cached} cache and {sessions} session entries"


def _count(keys: frozenset[bytes], prefix: bytes) -> int:
    return sum(key.startswith(prefix) for key in keys)


def report_json(report: Report, found: Sequence[Check]) -> Mapping[str, Any]:
    """Return the whole report as a JSON object."""
    return {
        "requests": [turn.to_json() for turn in report.all_turns],
        "cold_ttft_ms": report.turns[0].answer.ttft_ms,
        "warm_ttft_ms": report.again.answer.ttft_ms,
        "speedup": report.speedup,
        "metastore_restart": {
            when: {
                "cache_entries": _count(keys, CACHE_PREFIX),
                "session_entries": _count(keys, SESSION_PREFIX),
            }
            for when, keys in (("before", report.keys_before), ("after", report.keys_after))
        },
        "checks": [
            {"what": check.what, "holds": check.holds, "found": check.found} for check in found
        ],
    }
