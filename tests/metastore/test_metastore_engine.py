"""Group commit, and a store that never says more than the disk holds."""

import asyncio
import threading
from contextlib import AsyncExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harness.memory_files import MemoryFiles
from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.errors import ConditionFailedError, MetastoreUnavailableError
from kvplane_common.metastore import delete, delete_prefix, put
from kvplane_metastore.engine import QUEUE_BYTES, Engine, running_engine
from kvplane_metastore.store import Draft, KeyRange, Store
from kvplane_metastore.wal import LOG_NAME

SALT = b"saltsalt"
WAIT_S = 10.0
"""Longest that a test waits for a thread."""
Batch = list[metastore_pb2.Operation]


def contents(store: Store) -> dict[bytes, bytes]:
    return {key: entry.value for key, entry in store.between(KeyRange(b"\x00", b"\xff"))}


class SlowFiles(MemoryFiles):
    """Syncs the log only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.syncing = threading.Event()
        self.let = threading.Event()
        self.let.set()

    def sync(self, name: str) -> None:
        self.syncing.set()
        assert self.let.wait(WAIT_S)
        super().sync(name)

    def hold(self) -> None:
        self.syncing.clear()
        self.let.clear()

    async def until_syncing(self) -> None:
        assert await asyncio.to_thread(self.syncing.wait, WAIT_S)


async def test_writers_that_wait_together_share_one_sync() -> None:
    files = SlowFiles()
    async with running_engine(files, SALT) as engine, asyncio.TaskGroup() as writers:
        files.hold()
        before = files.syncs
        first = writers.create_task(engine.write([put(b"first", b"")]))
        await files.until_syncing()
        others = [writers.create_task(engine.write([put(b"%d" % i, b"")])) for i in range(50)]
        await asyncio.sleep(0)
        files.let.set()
        assert await first == 1
        assert [await other for other in others] == list(range(2, 52))
        assert files.syncs == before + 2


async def test_a_write_is_neither_told_nor_visible_before_it_is_on_disk() -> None:
    files = SlowFiles()
    async with running_engine(files, SALT) as engine, asyncio.TaskGroup() as writers:
        files.hold()
        write = writers.create_task(engine.write([put(b"k", b"v")]))
        await files.until_syncing()
        assert not write.done()
        assert engine.store.get(b"k") is None
        files.let.set()
        await write
        assert contents(engine.store) == {b"k": b"v"}


async def test_what_was_queued_is_still_committed_at_a_stop() -> None:
    files = SlowFiles()
    async with running_engine(files, SALT) as engine, asyncio.TaskGroup() as writers:
        files.hold()
        writes = [writers.create_task(engine.write([put(b"1", b"")]))]
        await files.until_syncing()
        writes.append(writers.create_task(engine.write([put(b"2", b"")])))
        await asyncio.sleep(0)
        engine.stop()
        files.let.set()
        assert [await write for write in writes] == [1, 2]
        with pytest.raises(MetastoreUnavailableError, match="stopping"):
            await engine.write([put(b"3", b"")])


async def test_a_writer_that_gave_up_while_it_was_queued_did_not_write() -> None:
    files = SlowFiles()
    async with running_engine(files, SALT) as engine, asyncio.TaskGroup() as writers:
        files.hold()
        writers.create_task(engine.write([put(b"1", b"")]))
        await files.until_syncing()
        gone = writers.create_task(engine.write([put(b"gone", b"")]))
        last = writers.create_task(engine.write([put(b"2", b"")]))
        await asyncio.sleep(0)
        gone.cancel()
        files.let.set()
        assert await last == 2
        assert contents(engine.store) == {b"1": b"", b"2": b""}


async def test_more_than_the_queue_takes_is_told_to_come_back() -> None:
    files = SlowFiles()
    async with running_engine(files, SALT) as engine, asyncio.TaskGroup() as writers:
        files.hold()
        large = [put(b"%d" % i, bytes(1024 * 1024)) for i in range(31)]
        writes = [writers.create_task(engine.write(large))]
        await files.until_syncing()
        writes += [writers.create_task(engine.write(large)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(MetastoreUnavailableError, match="wait for the disk") as told:
            await engine.write(large)
        assert told.value.facts["limit"] == str(QUEUE_BYTES)
        assert told.value.retry_after_ms
        files.let.set()
        assert [await write for write in writes] == [1, 2, 3, 4, 5]


async def test_of_two_writers_that_want_the_same_key_one_is_told_of_the_other() -> None:
    files = SlowFiles()
    absent = [metastore_pb2.Condition(key=b"lock", mod_revision=0)]
    async with running_engine(files, SALT) as engine:
        outcomes = await asyncio.gather(
            engine.write([put(b"lock", b"a")], absent),
            engine.write([put(b"lock", b"b"), put(b"more", b"b")], absent),
            return_exceptions=True,
        )
        assert outcomes[0] == 1
        assert isinstance(outcomes[1], ConditionFailedError)
        assert outcomes[1].facts == {"mod_revision": "1"}
        assert contents(engine.store) == {b"lock": b"a"}


@pytest.mark.parametrize("fail_in", [0, 1], ids=["the write fails", "the fsync fails"])
async def test_a_disk_that_refuses_makes_the_store_read_only(fail_in: int) -> None:
    files = MemoryFiles()
    async with running_engine(files, SALT) as engine:
        await engine.write([put(b"k", b"kept")])
        files.fail_in = fail_in
        with pytest.raises(MetastoreUnavailableError, match="refused a write"):
            await engine.write([put(b"k", b"lost")])
        files.fail_in = None
        before = files.live[LOG_NAME]
        with pytest.raises(MetastoreUnavailableError, match="restart the metastore"):
            await engine.write([put(b"k", b"late")])
        assert files.live[LOG_NAME] == before
        assert contents(engine.store) == {b"k": b"kept"}
        assert "the disk refused" in engine.read_only_reason
    files.crash()
    async with running_engine(files, SALT) as engine:
        assert contents(engine.store) == {b"k": b"kept"}


KEYS = st.sampled_from([b"a", b"a/1", b"a/2", b"b/1"])
OPERATIONS = st.one_of(
    st.builds(put, KEYS, st.binary(max_size=40)),
    st.builds(delete, KEYS),
    st.builds(delete_prefix, st.sampled_from([b"a/", b"b"])),
)
BATCHES = st.lists(OPERATIONS, min_size=1, max_size=3)


class DurableStore(RuleBasedStateMachine):
    """The store holds the acknowledged batches, whatever the disk and the power do.

    A batch that failed is unknown until the next start, which finds all of its group or nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.files = MemoryFiles()
        self.acknowledged = Store()
        self.unknown: list[Batch] = []

    @initialize()
    def start(self) -> None:
        self.stack = AsyncExitStack()
        opening = self.stack.enter_async_context(running_engine(self.files, SALT))
        self.engine: Engine = self.runner.run(opening)

    @rule(batches=st.lists(BATCHES, min_size=1, max_size=3))
    def write_together(self, batches: list[Batch]) -> None:
        outcomes = self.runner.run(self.write_all(batches))
        for batch, outcome in zip(batches, outcomes, strict=True):
            if isinstance(outcome, int):
                draft = Draft(self.acknowledged)
                assert draft.add(batch) == outcome
                self.acknowledged.apply(draft.changes)
            else:
                assert isinstance(outcome, MetastoreUnavailableError)
        failed = not isinstance(outcomes[0], int)
        if failed and not self.unknown and self.engine.log_bytes != len(self.files.live[LOG_NAME]):
            self.unknown = batches

    async def write_all(self, batches: list[Batch]) -> list[int | BaseException]:
        writes = (self.engine.write(batch) for batch in batches)
        return await asyncio.gather(*writes, return_exceptions=True)

    @rule(fail_in=st.integers(0, 4))
    def arm_the_disk(self, fail_in: int) -> None:
        self.files.fail_in = fail_in

    @rule(kept_bytes=st.integers(0, 200), zeroed=st.booleans())
    def lose_power(self, kept_bytes: int, zeroed: bool) -> None:
        self.stop()
        self.files.crash(kept_bytes, zeroed=zeroed)
        self.start_again()

    @rule()
    def restart(self) -> None:
        self.stop()
        self.files.fail_in = None
        self.start_again()

    @rule(fail_in=st.integers(0, 3))
    def fail_while_starting(self, fail_in: int) -> None:
        self.stop()
        self.files.fail_in = fail_in
        try:
            self.start()
        except OSError:
            self.files.crash()
            self.start()
        self.files.fail_in = None
        self.check_what_was_found()

    def start_again(self) -> None:
        self.start()
        self.check_what_was_found()

    def check_what_was_found(self) -> None:
        if self.engine.store.revision != self.acknowledged.revision:
            draft = Draft(self.acknowledged)
            for batch in self.unknown:
                draft.add(batch)
            self.acknowledged.apply(draft.changes)
        self.unknown = []

    @invariant()
    def holds_what_was_acknowledged(self) -> None:
        assert self.engine.store.revision == self.acknowledged.revision
        assert contents(self.engine.store) == contents(self.acknowledged)

    def stop(self) -> None:
        self.runner.run(self.stack.aclose())

    def teardown(self) -> None:
        self.stop()
        self.runner.close()


TestDurableStore = DurableStore.TestCase
TestDurableStore.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
