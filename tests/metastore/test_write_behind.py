"""Records that may lag: coalesced, in order, bounded, and never in the caller's way."""

import asyncio
from collections.abc import Sequence

import pytest

from harness.services import until
from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.background import background
from kvplane_common.errors import InvalidRequestError, KvplaneError, MetastoreUnavailableError
from kvplane_common.metastore import (
    MAX_KEY_BYTES,
    MAX_OPERATIONS,
    MAX_VALUE_BYTES,
    WriteBehind,
    delete,
    delete_prefix,
    prefix_end,
    put,
)


class Metastore:
    """Keeps the batches; `refusals` are raised first, one a call."""

    def __init__(self, *refusals: KvplaneError) -> None:
        self.batches: list[list[metastore_pb2.Operation]] = []
        self.refusals = list(refusals)
        self.open = asyncio.Event()
        self.open.set()
        self.called = asyncio.Event()

    async def write(self, operations: Sequence[metastore_pb2.Operation]) -> int:
        self.called.set()
        await self.open.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        self.batches.append(list(operations))
        return len(self.batches)

    async def has(self, batches: int) -> None:
        async def so_many() -> bool:
            return len(self.batches) >= batches

        await until(so_many)


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"/node/", b"/node0"), (b"a\xff\xff", b"b"), (b"\x00", b"\x01")]
)
def test_the_end_of_a_prefix_is_the_first_key_after_it(prefix: bytes, end: bytes) -> None:
    assert prefix_end(prefix) == end
    assert prefix + b"\xff" * 9 < end


@pytest.mark.parametrize("prefix", [b"", b"\xff\xff"])
def test_a_prefix_of_all_keys_has_no_end(prefix: bytes) -> None:
    with pytest.raises(ValueError, match="no key comes after"):
        prefix_end(prefix)


async def test_only_the_last_change_of_a_key_is_written() -> None:
    metastore = Metastore()
    behind = WriteBehind(metastore)
    behind.put(b"a", b"1")
    behind.put(b"b", b"1")
    behind.put(b"a", b"2")
    behind.delete(b"b")
    assert behind.pending == 2
    await behind.flush()
    assert metastore.batches == [[put(b"a", b"2"), put(b"b", b"1"), delete(b"b")]]
    assert behind.pending == 0


async def test_a_prefix_is_removed_after_what_was_put_before_and_before_what_is_put_later() -> None:
    metastore = Metastore()
    behind = WriteBehind(metastore)
    behind.put(b"p/old", b"")
    behind.put(b"q", b"")
    behind.delete_prefix(b"p/")
    behind.put(b"p/new", b"")
    behind.delete_prefix(b"p/new/")
    await behind.flush()
    assert metastore.batches == [
        [put(b"q", b""), delete_prefix(b"p/"), put(b"p/new", b""), delete_prefix(b"p/new/")]
    ]


async def test_the_loop_writes_and_retries_until_the_metastore_is_back() -> None:
    metastore = Metastore(MetastoreUnavailableError("away"), MetastoreUnavailableError("away"))
    behind = WriteBehind(metastore, every_s=0)
    async with background(behind.run()):
        behind.put(b"a", b"1")
        await metastore.has(batches=1)
        behind.put(b"a", b"2")
        await metastore.has(batches=2)
    assert metastore.batches == [[put(b"a", b"1")], [put(b"a", b"2")]]
    assert behind.dropped == 0


async def test_a_key_that_changes_while_it_is_written_is_written_again() -> None:
    metastore = Metastore()
    metastore.open.clear()
    behind = WriteBehind(metastore, every_s=0)
    async with background(behind.run()):
        behind.put(b"a", b"1")
        behind.put(b"b", b"1")
        await metastore.called.wait()
        behind.put(b"a", b"2")
        metastore.open.set()
        await metastore.has(batches=2)
    assert metastore.batches == [[put(b"a", b"1"), put(b"b", b"1")], [put(b"a", b"2")]]


async def test_a_batch_stays_within_the_limits_of_the_metastore() -> None:
    metastore = Metastore()
    behind = WriteBehind(metastore)
    for i in range(MAX_OPERATIONS + 1):
        behind.put(b"%d" % i, b"")
    for i in range(5):
        behind.put(b"large%d" % i, bytes(MAX_VALUE_BYTES))
    await behind.flush()
    assert [len(batch) for batch in metastore.batches] == [MAX_OPERATIONS, 4, 2]


async def test_beyond_the_bound_the_oldest_change_is_dropped_and_counted() -> None:
    metastore = Metastore()
    behind = WriteBehind(metastore, max_pending=2)
    for key in (b"a", b"b", b"a", b"c"):
        behind.put(key, b"")
    assert (behind.pending, behind.dropped) == (2, 1)
    await behind.flush()
    assert metastore.batches == [[put(b"a", b""), put(b"c", b"")]]


async def test_a_record_too_large_is_dropped_alone() -> None:
    metastore = Metastore()
    behind = WriteBehind(metastore)
    behind.put(b"k" * (MAX_KEY_BYTES + 1), b"")
    behind.put(b"k", bytes(MAX_VALUE_BYTES + 1))
    behind.put(b"", b"")
    behind.put(b"good", b"")
    await behind.flush()
    assert metastore.batches == [[put(b"good", b"")]]
    assert behind.dropped == 3


async def test_what_the_metastore_calls_invalid_is_not_tried_for_ever() -> None:
    metastore = Metastore(InvalidRequestError("no"))
    behind = WriteBehind(metastore)
    behind.put(b"bad", b"")
    await behind.flush()
    assert (behind.pending, behind.dropped) == (0, 1)


async def test_a_flush_gives_up_in_time_and_loses_nothing() -> None:
    metastore = Metastore()
    metastore.open.clear()
    behind = WriteBehind(metastore)
    behind.put(b"a", b"")
    await behind.flush(limit_s=0.01)
    assert behind.pending == 1
    metastore.open.set()
    await behind.flush()
    assert metastore.batches == [[put(b"a", b"")]]
