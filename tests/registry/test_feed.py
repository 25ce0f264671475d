"""What a watcher is told, however slowly it listens."""

import asyncio
from contextlib import aclosing

import pytest

from kvplane.common.v1.node_pb2 import Node
from kvplane_common.errors import UnavailableError
from kvplane_registry.feed import Feed


async def test_the_first_step_is_a_reset_even_without_nodes() -> None:
    async with aclosing(Feed().follow(list)) as steps:
        first = await anext(steps)
    assert first.reset
    assert not first.nodes


async def test_a_slow_watcher_gets_the_newest_state_of_each_node_once() -> None:
    feed = Feed()
    async with aclosing(feed.follow(list)) as steps:
        await anext(steps)
        for epoch in range(1, 1_001):
            feed.publish("a", Node(node_id="a", epoch=epoch))
            feed.publish("b", Node(node_id="b", epoch=epoch))
        feed.publish("b", None)
        step = await anext(steps)
    assert [(node.node_id, node.epoch) for node in step.nodes] == [("a", 1_000)]
    assert list(step.removed_node_ids) == ["b"]
    assert not step.reset


async def test_a_removed_node_that_returns_is_told_as_a_change() -> None:
    feed = Feed()
    async with aclosing(feed.follow(list)) as steps:
        await anext(steps)
        feed.publish("a", None)
        feed.publish("a", Node(node_id="a", epoch=2))
        step = await anext(steps)
    assert [node.epoch for node in step.nodes] == [2]
    assert not step.removed_node_ids


async def test_watchers_are_independent_and_leave_nothing_behind() -> None:
    feed = Feed()
    async with aclosing(feed.follow(list)) as one, aclosing(feed.follow(list)) as other:
        await anext(one)
        await anext(other)
        feed.publish("a", Node(node_id="a"))
        assert len((await anext(one)).nodes) == 1
        feed.publish("b", Node(node_id="b"))
        assert len((await anext(other)).nodes) == 2
        assert feed.watchers == 2
    assert feed.watchers == 0


async def test_closing_ends_a_waiting_watch_and_every_later_one() -> None:
    feed = Feed()
    async with aclosing(feed.follow(list)) as steps:
        await anext(steps)
        waiting = asyncio.ensure_future(anext(steps))
        await asyncio.sleep(0)
        feed.close()
        with pytest.raises(UnavailableError, match="stopping"):
            await waiting
    with pytest.raises(UnavailableError):
        async for _ in feed.follow(list):
            pass
