"""Showing a router's decision: every node that was weighed, and what it would have cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvplane.router.v1 import router_pb2
from kvplane_cli.render import Column, Row, count, known, name_of, number, table, text
from kvplane_cli.shell import stdout


def _total(row: Row) -> str:
    return f"{'' if row['measured'] else '~'}{number(row['total_ms'])}"


_COLUMNS = (text("node", "node"), Column("total ms", _total, right=True))
_DETAILS = (
    ("load", "load_ms"),
    ("wait", "slot_wait_ms"),
    ("prefill", "prefill_ms"),
    ("evict", "eviction_ms"),
    ("cached", "predicted_cached_tokens"),
    ("blocks out", "evicted_blocks"),
    ("left", "free_blocks_after"),
)
"""Titles and keys of what is shown only where a candidate has some of it."""


def decision_json(decision: router_pb2.Decision) -> Mapping[str, Any]:
    """Return a decision as a JSON object."""
    return {
        "request_id": decision.request_id,
        "stage": name_of(router_pb2.Stage.DESCRIPTOR, decision.stage),
        "node": decision.node_id or None,
        "policy": decision.policy,
        "estimated_prompt_tokens": decision.estimated_prompt_tokens,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "attempts": decision.attempts,
        "refusal_reason": decision.refusal_reason or None,
        "candidates": [_candidate(candidate) for candidate in decision.candidates],
    }


def show_decision(decision: router_pb2.Decision) -> None:
    """Print what was chosen, what every candidate would cost, and who was out."""
    row = decision_json(decision)
    where = f"→ {row['node']}" if row["node"] else f"refused: {row['refusal_reason']}"
    stdout().print(f"{row['request_id']}  {row['stage']} {where}", style="bold")
    stdout().print(
        f"policy {row['policy']}, attempts {row['attempts']}, "
        f"prompt about {number(row['estimated_prompt_tokens'])} tokens, "
        f"{number(row['predicted_cached_tokens'])} of them expected in the cache"
    )
    _show_candidates(row["candidates"], _code(row["refusal_reason"]))


def _show_candidates(candidates: Sequence[Row], refused_code: str) -> None:
    weighed = [row for row in candidates if not row["excluded_reason"]]
    if weighed:
        details = [count(title, key) for title, key in _DETAILS if _is_told(weighed, key)]
        stdout().print(table(weighed, (*_COLUMNS, *details)))
    if not all(row["measured"] for row in weighed):
        stdout().print("~ rests on assumed figures: not measured there yet")
    for row in candidates:
        # The refusal has told already what is the same for every node.
        if row["excluded_reason"] and _code(row["excluded_reason"]) != refused_code:
            stdout().print(f"{row['node']}: {row['excluded_reason']}")


def _is_told(rows: Sequence[Row], key: str) -> bool:
    # No blocks left is news; no wait, no load and nothing evicted are not.
    return any(row[key] is not None if key == "free_blocks_after" else row[key] for row in rows)


def _code(reason: str | None) -> str:
    return (reason or "").partition(":")[0]


def _candidate(candidate: router_pb2.Candidate) -> Mapping[str, Any]:
    return {
        "node": candidate.node_id,
        "total_ms": candidate.total_ms,
        "load_ms": candidate.load_ms,
        "slot_wait_ms": candidate.slot_wait_ms,
        "prefill_ms": candidate.prefill_ms,
        "eviction_ms": candidate.eviction_ms,
        "predicted_cached_tokens": candidate.predicted_cached_tokens,
        "evicted_blocks": candidate.evicted_blocks,
        "free_blocks_after": known(candidate, "free_blocks_after"),
        "measured": candidate.measured,
        "excluded_reason": candidate.excluded_reason or None,
    }
