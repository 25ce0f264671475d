"""Every stage of a decision on two nodes with real engines, held against what they measured."""

import asyncio

import pytest

from harness.clusters import Cluster, Router, begun, fresh, refused
from harness.routers import Answer
from harness.routing import chat
from kvplane.common.v1 import generation_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.errors import KvBudgetExceededError

Stage = router_pb2.Stage
TEMPLATE_TOKENS = 16
"""More than the chat template puts around a message."""


@pytest.fixture(params=["ttft", "ladder"])
def router(request: pytest.FixtureRequest, mini: Cluster) -> Router:
    """A router of each policy."""
    return mini.routers[["ttft", "ladder"].index(request.param)]


def cached(answer: Answer) -> int:
    usage = answer.completion.usage
    assert usage.evidence == generation_pb2.EVIDENCE_MEASURED
    return usage.cached_tokens


async def test_a_prompt_that_nobody_knows_is_a_miss_and_nothing_of_it_was_cached(
    router: Router,
) -> None:
    answer = await router.ask(fresh(300))
    assert answer.decision.stage == Stage.STAGE_MISS
    assert cached(answer) < 16
    assert answer.completion.usage.prompt_tokens == 300
    assert answer.completion.usage.completion_tokens == 4


async def test_the_next_turn_is_of_the_session_and_nearly_all_of_the_last_was_cached(
    router: Router,
) -> None:
    said = [fresh(300), fresh(20)]
    first = await router.ask(prompt=chat(*said), session_id="stages")
    said += [first.text, fresh(20)]
    second = await router.ask(prompt=chat(*said), session_id="stages")
    assert second.decision.stage == Stage.STAGE_SESSION
    assert second.decision.node_id == first.decision.node_id
    assert cached(second) > 0.8 * first.completion.usage.prompt_tokens
    assert second.decision.predicted_cached_tokens > 0.8 * first.completion.usage.prompt_tokens


async def test_the_same_prompt_again_is_exact_and_all_but_its_last_tokens_were_cached(
    router: Router,
) -> None:
    text = fresh(300)
    first = await router.ask(text)
    again = await router.ask(text)
    assert again.decision.stage == Stage.STAGE_EXACT
    assert again.decision.node_id == first.decision.node_id
    assert again.text == first.text
    assert 300 - 4 <= cached(again) < 300


async def test_another_question_under_the_same_instructions_is_a_prefix_and_those_were_cached(
    router: Router,
) -> None:
    instructions = fresh(300)
    first = await router.ask(prompt=chat(instructions, fresh(20)))
    other = await router.ask(prompt=chat(instructions, fresh(20)))
    assert other.decision.stage == Stage.STAGE_PREFIX
    assert other.decision.node_id == first.decision.node_id
    assert 300 <= cached(other) < 300 + TEMPLATE_TOKENS


async def test_where_every_pool_is_full_a_new_prompt_evicts_and_nothing_of_it_was_cached(
    nano: Cluster,
) -> None:
    for _ in range(4):
        # Half a pool each, wherever it goes.
        await nano.router.ask(fresh(230))
    await nano.until_at_rest()
    await nano.router.until(
        lambda core: all(node.resident_blocks == 8 for node in core.fleet.alive())
    )
    answer = await nano.router.ask(fresh(230))
    assert answer.decision.stage == Stage.STAGE_EVICT
    assert answer.decision.candidates[0].evicted_blocks == 4
    assert cached(answer) < 16


async def test_what_no_node_can_take_is_a_reject_that_tells_why_of_each(nano: Cluster) -> None:
    error = await refused(nano.router.ask("the", max_tokens=600, request_id="too much"))
    assert isinstance(error, KvBudgetExceededError)
    told = (await nano.router.explain("too much")).decision
    assert told.stage == Stage.STAGE_REJECT
    assert not told.node_id
    reasons = [told.refusal_reason, *(one.excluded_reason for one in told.candidates)]
    assert [reason.partition(":")[0] for reason in reasons] == ["KV_BUDGET_EXCEEDED"] * 3


async def test_under_load_the_ladder_waits_for_the_session_and_ttft_does_not(
    mini: Cluster,
) -> None:
    ttft, ladder = mini.routers
    said = [fresh(60), fresh(20)]
    # A long answer: the node learns that its slot is held for long, next to that prefill is short.
    first = await ladder.ask(prompt=chat(*said), session_id="busy", max_tokens=150)
    said += [first.text, fresh(20)]
    home = first.decision.node_id
    await mini.until_at_rest()
    await ttft.until(lambda core: bool(len(tuple(core.sessions.keys()))))
    running = ladder.stream(prompt=chat(*said), session_id="busy", max_tokens=3000)
    assert (await begun(running)).node_id == home
    await ttft.until(lambda core: ttft.in_flight(home) == 1)
    elsewhere = await ttft.ask(prompt=chat(*said), session_id="busy")
    assert elsewhere.decision.stage == Stage.STAGE_MISS
    assert elsewhere.decision.node_id != home
    waiting = asyncio.create_task(ladder.ask(prompt=chat(*said), session_id="busy"))
    await mini.agents[home].until_queued(1)
    running.cancel()
    assert (await waiting).decision.node_id == home
