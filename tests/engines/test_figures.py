"""Odd numbers from an engine."""

import json
from typing import Any

import pytest

from kvplane_node_agent.engines.base import Finished
from kvplane_node_agent.engines.figures import Figures
from kvplane_node_agent.engines.llama_wire import LlamaDecoder
from kvplane_node_agent.engines.ollama_wire import OllamaDecoder

ODD = [-1, "5", True, None, [], {}, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize("value", [*ODD, 1.5, 2**33], ids=lambda value: str(value)[:10])
def test_a_count_that_makes_no_sense_is_unknown(value: object) -> None:
    assert Figures({"n": value}).count("n") is None


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:10])
def test_a_duration_that_makes_no_sense_is_unknown(value: object) -> None:
    assert Figures({"ms": value}).duration("ms") is None


@pytest.mark.parametrize("told", [None, [1], "text", 5], ids=str)
def test_what_is_no_object_tells_nothing(told: object) -> None:
    assert Figures(told).count("n") is None
    assert Figures(told).duration("n") is None


def test_what_makes_sense_is_told() -> None:
    figures = Figures({"n": 7, "none": 0, "ms": 1.5})
    assert (figures.count("n"), figures.count("none")) == (7, 0)
    assert (figures.duration("n"), figures.duration("ms")) == (7.0, 1.5)


def llama(**fields: Any) -> Finished:
    timings = {"cache_n": 1, "prompt_n": 2, "predicted_n": 3, "prompt_ms": 4, "predicted_ms": 5}
    event = {"stop": True, "stop_type": "limit", "timings": timings | fields, "tokens_evaluated": 9}
    return end(LlamaDecoder(), b"data: " + json.dumps(event | fields).encode())


def ollama(**fields: Any) -> Finished:
    event = {"done": True, "done_reason": "stop", "prompt_eval_count": 3, "eval_count": 3}
    durations = {"load_duration": 1, "prompt_eval_duration": 2, "eval_duration": 3}
    return end(OllamaDecoder("0.33.2"), json.dumps(event | durations | fields).encode())


def end(decoder: LlamaDecoder | OllamaDecoder, line: bytes) -> Finished:
    (finished,) = decoder.read(line)
    assert isinstance(finished, Finished)
    return finished


@pytest.mark.parametrize(
    ("finished", "unknown", "known"),
    [
        (lambda: llama(cache_n=2**33), ["cached_tokens"], {"prompt_tokens": 9}),
        (lambda: llama(predicted_n=-1), ["completion_tokens"], {"prompt_tokens": 3}),
        (lambda: llama(prompt_ms=float("nan")), ["prefill_ms"], {"decode_ms": 5.0}),
        (lambda: llama(timings=[1]), ["prefill_ms", "decode_ms"], {"prompt_tokens": 9}),
        (lambda: llama(stop_type=[1]), [], {"prompt_tokens": 3}),
        (lambda: ollama(prompt_eval_count="3"), ["prompt_tokens"], {"completion_tokens": 3}),
        (lambda: ollama(eval_duration=-5), ["decode_ms"], {"prefill_ms": 2e-6}),
        (lambda: ollama(eval_count=1.5, done_reason={}), ["completion_tokens"], {}),
    ],
    ids=[
        "llama-server: a count beyond all bounds", "a negative count", "a time that is no number",
        "timings that are no object", "a reason that is no text", "Ollama: a text", "a negative "
        "time", "a fraction of a token",
    ],
)  # fmt: skip
def test_an_odd_figure_does_not_spoil_a_whole_answer(
    finished: Any, unknown: list[str], known: dict[str, float]
) -> None:
    told = finished()
    assert all(getattr(told, name) is None for name in unknown)
    assert {name: getattr(told, name) for name in known} == known
