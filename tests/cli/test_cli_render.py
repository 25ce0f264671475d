import io
import json
import time
from typing import Any

import pytest
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from kvplane.common.v1 import generation_pb2, node_pb2, prompt_pb2, records_pb2
from kvplane.router.v1 import router_pb2
from kvplane_cli.asking import Answer
from kvplane_cli.cache import cache_columns, residency_json, session_json
from kvplane_cli.decisions import decision_json, show_decision
from kvplane_cli.explain import outcome, to_json
from kvplane_cli.nodes import COLUMNS as NODE_COLUMNS
from kvplane_cli.nodes import to_json as node_json
from kvplane_cli.render import ago, count, kind_of, name_of, number, show, table, text

STAGE = router_pb2.Stage.DESCRIPTOR
STATE = node_pb2.Node.State.DESCRIPTOR


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        pytest.param(STAGE, router_pb2.STAGE_EXACT, "EXACT", id="a stage"),
        pytest.param(STATE, node_pb2.Node.STATE_LOST, "LOST", id="a nested enum"),
        pytest.param(STAGE, 99, "99", id="a value that only a newer router knows"),
    ],
)
def test_an_enum_value_is_shown_without_its_prefix(
    kind: EnumDescriptor, value: int, name: str
) -> None:
    assert name_of(kind, value) == name


def test_an_unspecified_enum_value_is_unknown() -> None:
    assert kind_of(STATE, 0) is None
    assert kind_of(STATE, node_pb2.Node.STATE_READY) == "ready"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "unknown"),
        (0, "0"),
        (7, "7"),
        (12_345, "12,345"),
        (3.14159, "3.14"),
        (1234.5, "1,234"),
    ],
)
def test_numbers_are_short_and_the_unknown_is_no_number(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("moment", "shown"),
    [
        (None, "unknown"),
        ("1970-01-01T00:16:30Z", "10 s ago"),
        ("1970-01-01T00:10:00Z", "7 min ago"),
        ("1970-01-01T02:16:40Z", "in 2 h"),
    ],
)
def test_times_are_shown_relative_to_now(moment: str | None, shown: str) -> None:
    assert ago(1_000_000, moment) == shown


def test_json_is_one_array_on_stdout_with_null_for_the_unknown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([{"a": None}], [text("a", "a")], as_json=True, empty="none")
    assert json.loads(capsys.readouterr().out) == [{"a": None}]


def test_no_rows_are_an_empty_array_in_json_and_a_sentence_for_people(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([], [text("a", "a")], as_json=True, empty="nothing yet")
    show([], [text("a", "a")], as_json=False, empty="nothing yet")
    shown = capsys.readouterr()
    assert json.loads(shown.out) == []
    assert shown.err == "nothing yet\n"


def test_a_table_that_goes_to_a_pipe_is_not_cut_to_eighty_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([{"a": "x" * 120, "b": 1}], [text("a", "a"), count("b", "b")], as_json=False, empty="")
    assert "x" * 120 in capsys.readouterr().out


def _answer(**usage: Any) -> Answer:
    decision = router_pb2.Decision(
        request_id="r1", node_id="node-1", stage=router_pb2.STAGE_SESSION
    )
    completion = generation_pb2.Completion(usage=generation_pb2.Usage(**usage))
    return Answer("hello", decision, completion, 12.0)


@pytest.mark.parametrize(
    ("usage", "shown"),
    [
        pytest.param({}, "prompt unknown tokens, cached unknown ", id="the engine said nothing"),
        pytest.param(
            {"prompt_tokens": 9, "cached_tokens": 0, "evidence": generation_pb2.EVIDENCE_MEASURED},
            "prompt 9 tokens, cached 0 ",
            id="a measured miss",
        ),
        pytest.param(
            {"prompt_tokens": 9, "cached_tokens": 8, "evidence": generation_pb2.EVIDENCE_INFERRED},
            "prompt 9 tokens, cached 8 (inferred) ",
            id="an inferred hit",
        ),
    ],
)
def test_the_line_under_an_answer_says_how_the_cached_tokens_are_known(
    usage: Any, shown: str
) -> None:
    line = _answer(**usage).summary()
    assert shown in line
    assert line.startswith("node-1  SESSION  ")


def test_an_answer_in_json_has_null_for_what_nobody_measured() -> None:
    shown = _answer(prompt_tokens=9).to_json()
    assert (shown["prompt_tokens"], shown["cached_tokens"], shown["evidence"]) == (9, None, None)
    assert (shown["ttft_ms"], shown["decode_ms"]) == (12.0, None)


def test_a_candidate_of_unknown_blocks_has_null_and_not_zero() -> None:
    decision = router_pb2.Decision(candidates=[router_pb2.Candidate(node_id="a", total_ms=3)])
    (candidate,) = decision_json(decision)["candidates"]
    assert candidate["free_blocks_after"] is None
    assert candidate["excluded_reason"] is None


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        pytest.param(router_pb2.ExplainResponse(), "has not ended", id="still running"),
        pytest.param(
            router_pb2.ExplainResponse(error="ABORTED: x"), "ended with ABORTED", id="failed"
        ),
        pytest.param(
            router_pb2.ExplainResponse(completion=generation_pb2.Completion()),
            "cached tokens: predicted 0, actual unknown\nfirst token:   predicted unknown, actual",
            id="nothing measured",
        ),
    ],
)
def test_an_explanation_says_how_the_request_ended(
    reply: router_pb2.ExplainResponse, shown: str
) -> None:
    assert shown in outcome(reply)


def test_actual_is_null_until_the_request_has_ended_well() -> None:
    assert to_json(router_pb2.ExplainResponse())["actual"] is None


def _node(**fields: Any) -> node_pb2.Node:
    model = node_pb2.Model(name="m", generation=2, slots=1)
    return node_pb2.Node(
        node_id="n",
        state=node_pb2.Node.STATE_READY,
        **{"epoch": 5, "capacity": node_pb2.Capacity(models=[model]), **fields},
    )


def test_a_node_in_json_has_null_for_what_nobody_measured() -> None:
    shown = node_json(_node())
    assert (shown["total_blocks"], shown["memory_total_bytes"]) == (None, None)
    (model,) = shown["models"]
    assert (model["active"], model["prefill_tokens_per_s"]) == (0, None)


@pytest.mark.parametrize(
    ("record", "nodes", "dead"),
    [
        pytest.param({"epoch": 5, "generation": 2}, {"n": _node()}, "", id="live"),
        pytest.param({"epoch": 4, "generation": 2}, {"n": _node()}, "restarted", id="older epoch"),
        pytest.param({"epoch": 5, "generation": 1}, {"n": _node()}, "reloaded", id="reloaded"),
        pytest.param({"epoch": 5, "generation": 2}, {}, "node gone", id="deregistered"),
        pytest.param(
            {"epoch": 5, "generation": 2},
            {"n": node_pb2.Node(node_id="n", epoch=5, state=node_pb2.Node.STATE_LOST)},
            "node lost",
            id="lost",
        ),
        pytest.param({"epoch": 5, "generation": 2}, None, None, id="registry away"),
    ],
)
def test_a_cache_record_tells_why_it_is_dead(record: Any, nodes: Any, dead: str | None) -> None:
    chain = prompt_pb2.Chain(digests=b"first.--last..--", ends=[1, 2])
    residency = records_pb2.Residency(node_id="n", model="m", chain=chain, **record)
    shown = residency_json(residency, nodes)
    assert shown["dead"] == dead
    assert bytes.fromhex(shown["digest"]) == b"last..--"


@pytest.mark.parametrize(
    ("nodes", "epoch", "shown"),
    [
        pytest.param({"n": _node()}, 5, "live", id="live"),
        pytest.param({"n": _node(capacity=None)}, 5, "engine away", id="its engine is away"),
        pytest.param({"n": _node(capacity=None)}, 4, "dead: restarted", id="dead anyway"),
        pytest.param(None, 5, "unknown", id="registry away"),
    ],
)
def test_a_cache_entry_lives_only_beside_its_engine(nodes: Any, epoch: int, shown: str) -> None:
    record = records_pb2.Residency(node_id="n", model="m", epoch=epoch, generation=2)
    row = residency_json(record, nodes)
    assert cache_columns()[-1].cell(row) == shown


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        pytest.param(_node(), "ready", id="ready"),
        pytest.param(_node(draining=True), "ready, draining", id="draining"),
        pytest.param(_node(capacity=None), "engine away", id="no models"),
        pytest.param(node_pb2.Node(node_id="n", state=node_pb2.Node.STATE_LOST), "lost", id="lost"),
    ],
)
def test_a_node_without_models_shows_that_its_engine_is_away(
    node: node_pb2.Node, shown: str
) -> None:
    state = next(column for column in NODE_COLUMNS if column.title == "state")
    assert state.cell(node_json(node)) == shown


MODEL = "llama3.1:8b"
NODE = "gpu-box-12"
LONG_NODE = node_pb2.Node(
    node_id=NODE,
    address="192.168.100.112:7710",
    state=node_pb2.Node.STATE_READY,
    draining=True,
    capacity=node_pb2.Capacity(
        models=[node_pb2.Model(name=MODEL, slots=16, prefill_tokens_per_s=12_345.0)],
        total_blocks=4_096,
    ),
)
LONG_RECORD = records_pb2.Residency(
    node_id=NODE,
    model=MODEL,
    tokens=128_000,
    hits=1_234,
    last_use_time=Timestamp(seconds=int(time.time()) - 3_000),
    chain=prompt_pb2.Chain(digests=b"12345678", ends=[1]),
)


@pytest.mark.parametrize(
    ("rows", "columns", "whole"),
    [
        pytest.param(
            [node_json(LONG_NODE)], NODE_COLUMNS, [NODE, LONG_NODE.address, "0/4,096"], id="nodes"
        ),
        pytest.param(
            [residency_json(LONG_RECORD, {NODE: _node(epoch=9)})],
            cache_columns(),
            [NODE, MODEL, "31323334", "~128,000", "1,234", "50 min", "dead: restarted"],
            id="cache",
        ),
    ],
)
def test_a_table_keeps_its_words_whole_at_eighty_columns(
    rows: Any, columns: Any, whole: list[str]
) -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(rows, columns))
    assert all(len(line) <= 80 for line in captured.get().splitlines())
    for word in whole:
        assert word in captured.get()


def _candidate(node_id: str, **fields: Any) -> router_pb2.Candidate:
    return router_pb2.Candidate(node_id=node_id, **fields)


def _explained(decision: router_pb2.Decision, capsys: pytest.CaptureFixture[str]) -> str:
    show_decision(decision)
    return capsys.readouterr().out


def test_only_the_costs_that_some_node_has_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    candidate = _candidate("a", total_ms=9, prefill_ms=9, free_blocks_after=0, measured=True)
    shown = _explained(router_pb2.Decision(node_id="a", candidates=[candidate]), capsys)
    assert "prefill" in shown
    assert "left" in shown
    assert not {"load", "wait", "evict", "cached", "~"} & set(shown.split())


def test_a_cost_that_rests_on_assumptions_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    candidates = [_candidate("a", total_ms=9, measured=True), _candidate("b", total_ms=10)]
    shown = _explained(router_pb2.Decision(node_id="a", candidates=candidates), capsys)
    assert "~10" in shown
    assert "~9" not in shown
    assert "~ rests on assumed figures" in shown


def test_nodes_that_were_out_are_told_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    out = _candidate("b", excluded_reason="NODE_DRAINING: b is draining")
    decision = router_pb2.Decision(
        node_id="a", candidates=[_candidate("a", total_ms=9, measured=True), out]
    )
    shown = _explained(decision, capsys)
    assert shown.endswith("b: NODE_DRAINING: b is draining\n")
    assert "~" not in shown


def test_a_refusal_is_told_once_and_without_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    reason = "QUEUE_FULL: 4 wait, the limit is 4"
    decision = router_pb2.Decision(
        stage=router_pb2.STAGE_REJECT,
        refusal_reason=reason,
        candidates=[_candidate(name, excluded_reason=reason) for name in "ab"],
    )
    shown = _explained(decision, capsys)
    assert shown.count("QUEUE_FULL") == 1
    assert "total ms" not in shown


def test_a_session_of_unknown_length_has_null_tokens() -> None:
    shown = session_json(records_pb2.Session(node_id="n", epoch=5), {"n": _node()})
    assert (shown["tokens"], shown["dead"]) == (None, "")
