from dataclasses import replace
from typing import Any

import pytest

from kvplane.common.v1 import generation_pb2
from kvplane.router.v1 import router_pb2
from kvplane_cli.asking import Answer
from kvplane_cli.demo_checks import Report, Turn, checks


def _turn(
    what: str,
    stage: router_pb2.Stage.ValueType,
    prompt: int,
    cached: int | None,
    *,
    node: str = "a",
    ttft_ms: float = 100.0,
) -> Turn:
    usage = generation_pb2.Usage(prompt_tokens=prompt, cached_tokens=cached)
    decision = router_pb2.Decision(node_id=node, stage=stage)
    return Turn(what, Answer("hi", decision, generation_pb2.Completion(usage=usage), ttft_ms))


GOOD = Report(
    turns=[
        _turn("turn 1", router_pb2.STAGE_MISS, 1000, 0, ttft_ms=6000),
        _turn("turn 2", router_pb2.STAGE_SESSION, 1050, 1020),
        _turn("turn 3", router_pb2.STAGE_SESSION, 1100, 1070),
    ],
    again=_turn("again", router_pb2.STAGE_EXACT, 1000, 999),
    other_user=_turn("other", router_pb2.STAGE_PREFIX, 1000, 970),
    unrelated=_turn("else", router_pb2.STAGE_MISS, 40, 0, node="b"),
    after_restart=_turn("last", router_pb2.STAGE_SESSION, 1150, 1120),
    keys_before=frozenset({b"/cache/a", b"/session/s"}),
    keys_after=frozenset({b"/cache/a", b"/session/s"}),
)


def test_a_demo_in_which_all_holds_breaks_no_check() -> None:
    assert [check.what for check in checks(GOOD) if not check.holds] == []


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        pytest.param(
            {"turns": [*GOOD.turns[:2], _turn("turn 3", router_pb2.STAGE_MISS, 1100, 1070)]},
            ["turn 3: stage SESSION"],
            id="a turn that is not routed by its session",
        ),
        pytest.param(
            {
                "turns": [
                    *GOOD.turns[:2],
                    _turn("turn 3", router_pb2.STAGE_SESSION, 1, 999, node="b"),
                ]
            },
            ["turn 3: on the first turn's node"],
            id="a turn on another node",
        ),
        pytest.param(
            {"turns": [*GOOD.turns[:2], _turn("turn 3", router_pb2.STAGE_SESSION, 1100, None)]},
            ["turn 3: over 80% of the prompt before it was cached"],
            id="unknown cached tokens are no hit",
        ),
        pytest.param(
            {"again": _turn("again", router_pb2.STAGE_EXACT, 1000, 900)},
            ["again: at most 8 tokens were evaluated"],
            id="a repeat that was half evaluated again",
        ),
        pytest.param(
            {"again": _turn("again", router_pb2.STAGE_EXACT, 1000, 999, ttft_ms=2000)},
            ["warm TTFT is at least 5x lower than cold on the same prompt"],
            id="a warm start that is not warm",
        ),
        pytest.param(
            {"other_user": _turn("other", router_pb2.STAGE_MISS, 1000, 0)},
            ["other: stage PREFIX"],
            id="a shared prefix that was not found",
        ),
        pytest.param(
            {"keys_after": frozenset({b"/cache/a"})},
            ["cache and session entries outlive a SIGKILL of the metastore"],
            id="a lost entry",
        ),
        pytest.param(
            {"keys_before": frozenset()},
            ["cache and session entries outlive a SIGKILL of the metastore"],
            id="nothing was remembered at all",
        ),
    ],
)
def test_the_check_that_does_not_hold_is_named(change: dict[str, Any], broken: list[str]) -> None:
    found = checks(replace(GOOD, **change))
    assert [check.what for check in found if not check.holds] == broken
