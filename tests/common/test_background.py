"""Tasks beside a block, and pauses."""

import asyncio
from itertools import islice

import pytest
from structlog.testing import capture_logs

from kvplane_common.background import background, pauses_s


async def _until_cancelled(started: asyncio.Event, cleaned: list[str]) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        cleaned.append("cleaned")


async def test_tasks_have_cleaned_up_when_the_block_has_ended() -> None:
    started, cleaned = asyncio.Event(), list[str]()
    async with background(_until_cancelled(started, cleaned)):
        await started.wait()
        assert cleaned == []
    assert cleaned == ["cleaned"]


async def test_tasks_end_with_a_block_that_raises() -> None:
    started, cleaned = asyncio.Event(), list[str]()

    async def block() -> None:
        async with background(_until_cancelled(started, cleaned)):
            await started.wait()
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        await block()
    assert cleaned == ["cleaned"]


async def test_tasks_end_with_a_block_that_is_cancelled() -> None:
    started, cleaned = asyncio.Event(), list[str]()

    async def block() -> None:
        async with background(_until_cancelled(started, cleaned)):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(block())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == ["cleaned"]


async def test_a_task_that_fails_is_logged_and_ends_the_block() -> None:
    started, cleaned = asyncio.Event(), list[str]()

    async def fail() -> None:
        await started.wait()
        raise ValueError("out of ideas")

    async def block() -> None:
        async with background(fail(), _until_cancelled(started, cleaned)):
            await asyncio.Event().wait()

    with capture_logs() as logs, pytest.raises(RuntimeError) as caught:
        await asyncio.create_task(block())
    assert isinstance(caught.value.__cause__, ValueError)
    assert [log["event"] for log in logs] == ["background task failed"]
    assert "fail" in logs[0]["task"]
    assert cleaned == ["cleaned"]


async def test_a_task_that_somebody_else_cancels_has_failed() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def block() -> None:
        async with background(cancelled()):
            await asyncio.Event().wait()

    with capture_logs() as logs, pytest.raises(RuntimeError, match="background task failed"):
        await asyncio.create_task(block())
    assert len(logs) == 1


async def test_a_task_that_fails_while_it_cleans_up_is_logged() -> None:
    started = asyncio.Event()

    async def clumsy() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            raise ValueError("at the end")

    with capture_logs() as logs:
        async with background(clumsy()):
            await started.wait()
    assert [log["event"] for log in logs] == ["background task failed at its end"]


async def test_a_task_that_ends_well_ends_nothing_else() -> None:
    started, cleaned = asyncio.Event(), list[str]()

    async def end() -> None:
        await started.wait()

    async with background(end(), _until_cancelled(started, cleaned)):
        await started.wait()
        await asyncio.sleep(0)
        assert cleaned == []


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(pauses_s(0.1, 0.5), 5)) == [0.1, 0.2, 0.4, 0.5, 0.5]
