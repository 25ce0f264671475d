"""How long a silent engine keeps an answer waiting."""

import asyncio

import pytest

from kvplane_node_agent.patience import Patience


def never() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


async def test_silence_ends_a_wait_only_once_the_engine_counts_as_gone() -> None:
    patience, silence = Patience(gone_s=0), never()
    waiting = asyncio.create_task(patience.wait_for(silence))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    patience.lose()
    with pytest.raises(TimeoutError):
        await waiting
    assert silence.cancelled()


async def test_a_wait_that_begins_when_the_engine_is_gone_ends_too() -> None:
    patience = Patience(gone_s=0)
    patience.lose()
    with pytest.raises(TimeoutError):
        await patience.wait_for(never())


async def test_an_engine_that_returns_may_be_silent_again() -> None:
    patience, said = Patience(gone_s=60), never()
    waiting = asyncio.create_task(patience.wait_for(said))
    await asyncio.sleep(0)
    patience.lose()
    patience.regain()
    said.set_result(None)
    await waiting


async def test_a_piece_in_time_is_passed_on_while_the_engine_is_gone() -> None:
    patience, said = Patience(gone_s=60), never()
    patience.lose()
    said.set_result(None)
    await patience.wait_for(said)
