"""Two routers side by side share nothing but what metastore and registry tell them."""

import asyncio

from harness.clusters import Cluster, begun, fresh
from harness.routing import chat
from kvplane.router.v1 import router_pb2


async def test_a_session_that_begins_through_one_router_goes_on_through_the_other(
    mini: Cluster,
) -> None:
    said = [fresh(200), fresh(20)]
    first = await mini.routers[0].ask(prompt=chat(*said), session_id="shared")
    await mini.until_at_rest()  # the other router has heard of that, too
    key = b"/session/default/shared"
    await mini.routers[1].until(lambda core: key in set(core.sessions.keys()))
    said += [first.text, fresh(20)]
    second = await mini.routers[1].ask(prompt=chat(*said), session_id="shared")
    assert second.decision.stage == router_pb2.STAGE_SESSION
    assert second.decision.node_id == first.decision.node_id
    cached_tokens = second.completion.usage.cached_tokens
    assert cached_tokens > 0.8 * first.completion.usage.prompt_tokens


async def test_a_prompt_that_came_through_one_router_is_exact_through_the_other(
    mini: Cluster,
) -> None:
    text = fresh(200)
    first = await mini.routers[1].ask(text)
    await mini.until_at_rest()
    keys = await mini.until_recorded()
    await mini.routers[0].until(lambda core: keys <= set(core.index.keys()))
    again = await mini.routers[0].ask(text)
    assert again.decision.stage == router_pb2.STAGE_EXACT
    assert again.decision.node_id == first.decision.node_id


async def test_each_router_hears_of_the_others_load(mini: Cluster) -> None:
    ttft, ladder = mini.routers
    running = ladder.stream(fresh(20), max_tokens=3000)
    home = (await begun(running)).node_id
    await ttft.until(lambda core: ttft.in_flight(home) == 1)
    weighed = (await ttft.ask(fresh(20))).decision.candidates
    assert {one.node_id: one.slot_wait_ms > 0 for one in weighed} == {
        name: name == home for name in mini.agents
    }
    running.cancel()


async def test_requests_through_both_at_once_overrun_no_node(nano: Cluster) -> None:
    second = await nano.add_router(policy="ttft")
    answers = await asyncio.gather(
        *(router.ask(fresh(20)) for _ in range(3) for router in (nano.router, second))
    )
    assert all(answer.text for answer in answers)
    await nano.until_at_rest()
