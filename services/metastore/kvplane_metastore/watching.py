"""A watch: a cursor into the store's history, and a snapshot where the history does not reach."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator

from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.channels import MAX_MESSAGE_BYTES
from kvplane_metastore.engine import Engine
from kvplane_metastore.store import Change, Entry, KeyRange

CHUNK_BYTES = 512 * 1024
"""A step of a snapshot takes no further key once it holds this many bytes."""

_LARGEST_STEP_BYTES = MAX_MESSAGE_BYTES - 1024
_Step = metastore_pb2.WatchResponse


async def watch(
    engine: Engine, keys: KeyRange, start_revision: int
) -> AsyncGenerator[metastore_pb2.WatchResponse, None]:
    """Yield the steps of a watch until the engine is stopping.

    A watcher holds no more than its place, and while it reads a snapshot the values in that. One
    that is slow never blocks a writer; when the history has moved on without it, it begins again
    with a snapshot.
    """
    store = engine.store
    seen = start_revision if start_revision and store.remembers(start_revision) else None
    if seen is not None:
        yield _Step(kind=_Step.KIND_SYNCED, revision=seen)
    while not engine.stopping.is_set():
        if seen is None:
            seen = store.revision
            # A copy of references, so that the snapshot is of one revision however slow its reader.
            for step in snapshot(list(store.between(keys)), seen):
                if engine.stopping.is_set():
                    return
                yield step
        change = store.change_after(seen)
        if change is None:
            if store.remembers(seen):
                await engine.wait_after(seen)
            else:
                seen = None
            continue
        changed = changes(change, keys)
        if changed.events:
            # What no message can carry is told as a snapshot, in chunks.
            if changed.ByteSize() > _LARGEST_STEP_BYTES:
                seen = None
                continue
            yield changed
        else:
            await asyncio.sleep(0)
        seen = change.revision


def snapshot(entries: Iterable[tuple[bytes, Entry]], revision: int) -> Iterator[_Step]:
    """Yield RESET, the entries in chunks, and SYNCED."""
    yield _Step(kind=_Step.KIND_RESET, revision=revision)
    chunk = _Step(kind=_Step.KIND_SNAPSHOT, revision=revision)
    size_bytes = 0
    for key, entry in entries:
        chunk.events.add(key=key, value=entry.value, mod_revision=entry.mod_revision)
        size_bytes += len(key) + len(entry.value)
        if size_bytes >= CHUNK_BYTES:
            yield chunk
            chunk = _Step(kind=_Step.KIND_SNAPSHOT, revision=revision)
            size_bytes = 0
    if chunk.events:
        yield chunk
    yield _Step(kind=_Step.KIND_SYNCED, revision=revision)


def changes(change: Change, keys: KeyRange) -> _Step:
    """Return the step that tells what a change did to a range; without events if nothing."""
    step = _Step(kind=_Step.KIND_CHANGES, revision=change.revision)
    for key, value in change.events:
        if key in keys:
            step.events.add(key=key, value=value, mod_revision=change.revision)
    return step
