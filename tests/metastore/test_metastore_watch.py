"""A watch is a cursor: it snapshots, resumes, and begins again where the history is gone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from harness.memory_files import MemoryFiles
from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.channels import MAX_MESSAGE_BYTES
from kvplane_common.metastore import MAX_VALUE_BYTES, delete, put
from kvplane_metastore.engine import Engine, running_engine
from kvplane_metastore.store import KeyRange, Store
from kvplane_metastore.watching import CHUNK_BYTES, watch

Step = metastore_pb2.WatchResponse
A = KeyRange(b"a/", b"a0")


@asynccontextmanager
async def an_engine(store: Store | None = None) -> AsyncIterator[Engine]:
    async with running_engine(MemoryFiles(), b"saltsalt", store) as engine:
        yield engine


def told(step: metastore_pb2.WatchResponse) -> tuple[str, int, dict[bytes, bytes | None]]:
    kind = Step.Kind.Name(step.kind).removeprefix("KIND_")
    events = {e.key: e.value if e.HasField("value") else None for e in step.events}
    return kind, step.revision, events


async def steps(watched: AsyncIterator[Step], count: int) -> list[object]:
    return [told(await anext(watched)) for _ in range(count)]


async def test_a_watch_begins_with_a_snapshot_and_goes_on_with_changes() -> None:
    async with an_engine() as engine:
        await engine.write([put(b"a/1", b"1"), put(b"b/1", b"no")])
        watched = watch(engine, A, 0)
        assert await steps(watched, 3) == [
            ("RESET", 1, {}),
            ("SNAPSHOT", 1, {b"a/1": b"1"}),
            ("SYNCED", 1, {}),
        ]
        await engine.write([put(b"a/2", b""), delete(b"a/1"), put(b"b/2", b"no")])
        await engine.write([put(b"b/3", b"no")])
        await engine.write([put(b"a/3", b"3")])
        assert await steps(watched, 2) == [
            ("CHANGES", 2, {b"a/2": b"", b"a/1": None}),
            ("CHANGES", 4, {b"a/3": b"3"}),
        ]


async def test_an_empty_range_has_a_snapshot_too() -> None:
    async with an_engine() as engine:
        assert await steps(watch(engine, A, 0), 2) == [("RESET", 0, {}), ("SYNCED", 0, {})]


async def test_a_watch_resumes_after_the_revision_it_has_seen() -> None:
    async with an_engine() as engine:
        for i in range(3):
            await engine.write([put(b"a/k", b"%d" % i)])
        assert await steps(watch(engine, A, 1), 3) == [
            ("SYNCED", 1, {}),
            ("CHANGES", 2, {b"a/k": b"1"}),
            ("CHANGES", 3, {b"a/k": b"2"}),
        ]


async def test_a_revision_that_the_store_never_had_is_answered_with_a_snapshot() -> None:
    async with an_engine() as engine:
        await engine.write([put(b"a/1", b"1")])
        assert await steps(watch(engine, A, 9), 2) == [
            ("RESET", 1, {}),
            ("SNAPSHOT", 1, {b"a/1": b"1"}),
        ]


async def test_a_watcher_that_fell_behind_begins_again() -> None:
    async with an_engine(Store(history_changes=2)) as engine:
        watched = watch(engine, A, 0)
        await steps(watched, 2)
        for i in range(4):
            await engine.write([put(b"a/k", b"%d" % i)])
        assert await steps(watched, 3) == [
            ("RESET", 4, {}),
            ("SNAPSHOT", 4, {b"a/k": b"3"}),
            ("SYNCED", 4, {}),
        ]
        await engine.write([put(b"a/k", b"4")])
        assert await steps(watched, 1) == [("CHANGES", 5, {b"a/k": b"4"})]


async def test_a_snapshot_comes_in_chunks_of_one_revision() -> None:
    async with an_engine() as engine:
        value = bytes(CHUNK_BYTES // 2)
        await engine.write([put(b"a/%d" % i, value) for i in range(5)])
        watched = watch(engine, A, 0)
        assert told(await anext(watched))[0] == "RESET"
        await engine.write([put(b"a/9", b"later")])
        chunks = [await anext(watched) for _ in range(3)]
        assert [len(chunk.events) for chunk in chunks] == [2, 2, 1]
        assert {chunk.revision for chunk in chunks} == {1}
        assert await steps(watched, 2) == [("SYNCED", 1, {}), ("CHANGES", 2, {b"a/9": b"later"})]


async def test_a_change_too_large_for_a_message_is_told_as_a_snapshot() -> None:
    async with an_engine() as engine:
        watched = watch(engine, A, 0)
        await steps(watched, 2)
        value = bytes(MAX_VALUE_BYTES)
        await engine.write([put(b"a/%d" % i, value) for i in range(MAX_MESSAGE_BYTES >> 20)])
        first = [(await anext(watched)).kind for _ in range(2)]
        assert first == [Step.KIND_RESET, Step.KIND_SNAPSHOT]


async def test_a_watch_ends_when_the_engine_is_stopping() -> None:
    async with an_engine() as engine:
        watched = watch(engine, A, 0)
        await steps(watched, 2)
        engine.end_watches()
        assert [step async for step in watched] == []
        assert [step async for step in watch(engine, A, 0)] == []
