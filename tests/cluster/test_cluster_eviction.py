"""Many prompts on a small KV budget."""

import asyncio

from harness.clusters import Cluster, fresh
from harness.routing import chain
from kvplane.router.v1 import router_pb2

POOL_BLOCKS = 8
LANES = 4


async def test_the_oldest_idle_prompts_go_and_the_last_used_stay(nano: Cluster) -> None:
    async with nano.only("a"):
        texts = [fresh(80) for _ in range(6)]  # two blocks each, of eight
        for text in texts[:4]:
            await nano.router.ask(text)
        await nano.router.ask(texts[0])  # used again: now the second is the oldest
        for text in texts[4:]:
            await nano.router.ask(text)
        held = (await nano.agents["a"].listing()).residencies
        kept = [texts[5], texts[4], texts[0], texts[3]]
        digests = [chain(text, nano.model).last for text in kept]
        assert [one.chain.digests[-8:] for one in held] == digests


async def test_under_pressure_all_are_served_and_the_pool_is_never_overrun(nano: Cluster) -> None:
    done = asyncio.Event()
    seen: list[int] = []

    async def watch() -> None:
        while not done.is_set():
            loads = (await nano.loads()).values()
            seen.extend(load.active_blocks + load.resident_blocks for load in loads)
            await asyncio.sleep(0)

    async def lane() -> list[router_pb2.Decision]:
        return [(await nano.router.ask(fresh(150))).decision for _ in range(8)]

    watching = asyncio.create_task(watch())
    lanes = await asyncio.gather(*(lane() for _ in range(LANES)))
    done.set()
    await watching
    decisions = [decision for lane in lanes for decision in lane]
    assert len(decisions) == 8 * LANES
    assert max(seen) <= POOL_BLOCKS
    assert router_pb2.STAGE_EVICT in {decision.stage for decision in decisions}
    await nano.until_at_rest()
    for load in (await nano.loads()).values():
        assert 0 < load.resident_blocks <= POOL_BLOCKS


async def test_what_was_evicted_is_no_longer_on_record_nor_credited(nano: Cluster) -> None:
    async with nano.only("a"):
        first = fresh(230)
        await nano.router.ask(first)
        await nano.until_recorded()
        for _ in range(2):
            await nano.router.ask(fresh(230))
        keys = await nano.until_recorded()
        assert len(keys) == 2
        await nano.router.until(lambda core: set(core.index.keys()) >= keys)
        again = await nano.router.ask(first)
        assert again.decision.predicted_cached_tokens == 0
