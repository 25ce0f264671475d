"""What both dialects' lines mean, without an engine."""

import json
from typing import Any

import pytest

from kvplane.common.v1 import generation_pb2
from kvplane_common.requests import model_name
from kvplane_node_agent.engines.base import Finished, Piece
from kvplane_node_agent.engines.llama_wire import LlamaDecoder
from kvplane_node_agent.engines.ollama_wire import OllamaDecoder, counts_whole_prompt

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
UNSPECIFIED = generation_pb2.FINISH_REASON_UNSPECIFIED


def sse(*events: dict[str, Any] | str) -> list[bytes]:
    return [
        f"data: {event if isinstance(event, str) else json.dumps(event)}".encode()
        for event in events
    ]


def chunk(delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}], **more}


TIMINGS = {"cache_n": 7, "prompt_n": 3, "prompt_ms": 1.5, "predicted_n": 2, "predicted_ms": 4.5}
WHOLE = Finished(STOP, 10, 7, 2, None, 1.5, 4.5)
USAGE = {"prompt_tokens": 10, "completion_tokens": 2}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            sse({"content": "a"}, {"content": "", "stop": True, "stop_type": "eos"}),
            [Piece("a"), Finished(STOP)],
        ),
        (sse({"content": "", "stop": True, "stop_type": "eos", "timings": TIMINGS}), [WHOLE]),
        (
            sse({"content": "b", "stop": True, "stop_type": "none", "tokens_evaluated": 10}),
            [Piece("b"), Finished(UNSPECIFIED, 10)],
        ),
        (
            sse(
                chunk({"role": "assistant", "content": None}, prompt_progress={"total": 3}),
                chunk({"content": "a"}),
                chunk({}, "stop"),
                {"choices": [], "usage": USAGE, "timings": TIMINGS},
                "[DONE]",
            ),
            [Piece("a"), WHOLE],
        ),
        (
            sse(chunk({"reasoning_content": "hm"}), chunk({}, "length", usage=USAGE), "[DONE]"),
            [Piece(""), Finished(LENGTH, 10, None, 2)],
        ),
        ([b": ping", b"", b"event: x", b"data:"], []),
    ],
    ids=[
        "text without timings",
        "text with timings",
        "text cut short, older server",
        "chat",
        "chat that thinks, without timings",
        "comments",
    ],
)
def test_llama_server_says(lines: list[bytes], expected: list[Piece | Finished]) -> None:
    decoder = LlamaDecoder()
    assert [event for line in lines for event in decoder.read(line)] == expected


END = {"done": True, "done_reason": "stop"}
DURATIONS = {"load_duration": 2_000_000, "prompt_eval_duration": 1_500_000, "eval_duration": 500}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"message": {"role": "assistant", "content": "a"}, "done": False}, [Piece("a")]),
        ({"response": "a", "done": False}, [Piece("a")]),
        ({"message": {"content": "", "thinking": "hm"}, "done": False}, [Piece("")]),
        ({"response": "", "done": False}, []),
        (END, [Finished(STOP)]),
        ({"done": True, "done_reason": "load"}, [Finished(UNSPECIFIED)]),
        (
            END | DURATIONS | {"prompt_eval_count": 9, "eval_count": 3},
            [Finished(STOP, 9, None, 3, 2.0, 1.5, 0.0005)],
        ),
        (
            END | {"prompt_eval_count": 9, "prompt_eval_cached_count": 0},
            [Finished(STOP, 9, 0)],
        ),
    ],
    ids=[
        "a piece of a chat",
        "a piece of text",
        "a thought",
        "nothing",
        "an end without counts",
        "that it has loaded the model",
        "an end with counts",
        "an end with no cached token",
    ],
)
def test_ollama_says(event: dict[str, Any], expected: list[Piece | Finished]) -> None:
    assert list(OllamaDecoder("0.33.3").read(json.dumps(event).encode())) == expected


def test_an_ollama_that_reports_cached_tokens_counts_them_in_whatever_its_version() -> None:
    line = json.dumps(END | {"prompt_eval_count": 9, "prompt_eval_cached_count": 8}).encode()
    assert list(OllamaDecoder("0.30.0").read(line)) == [Finished(STOP, 9, 8)]


@pytest.mark.parametrize(
    ("version", "whole"),
    [
        ("0.1.48", False),
        ("0.3.14", False),
        ("0.4.0", True),
        ("0.4.0-rc3", True),
        ("0.24.0", True),
        ("0.30.0", False),
        ("0.30.0-rc1", False),
        ("0.30.1", True),
        ("v0.33.3", True),
        ("1.0.0", True),
        ("0.0.0", True),
        ("", True),
        ("nightly", True),
    ],
)
def test_prompt_eval_count_is_of_the_whole_prompt_by_version(version: str, whole: bool) -> None:
    assert counts_whole_prompt(version) is whole


@pytest.mark.parametrize(
    ("name", "short"),
    [("mini:latest", "mini"), ("mini", "mini"), ("smollm2:135m", "smollm2:135m")],
)
def test_only_the_tag_that_ollama_adds_is_cut(name: str, short: str) -> None:
    assert model_name(name) == short
