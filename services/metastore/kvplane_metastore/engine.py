"""The store and its log as one: writers share an fsync, readers see only what is on disk.

One task commits. It takes all the writers that wait, drafts their batches one after the other,
writes them as one frame in a thread, and only then applies them in memory and answers. Those that
arrive meanwhile form the next group, so the slower the disk, the larger the groups.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from kvplane.metastore.v1 import log_pb2, metastore_pb2
from kvplane_common.errors import ConditionFailedError, KvplaneError, MetastoreUnavailableError
from kvplane_metastore.files import Files
from kvplane_metastore.store import Draft, Entry, Store
from kvplane_metastore.wal import Recovered, open_wal

GROUP_BYTES = 8 * 1024 * 1024
"""A commit takes no further batch once it holds this many bytes."""
QUEUE_BYTES = 128 * 1024 * 1024
"""Most bytes of batches that wait for the disk; beyond, writers are told to come back."""

_COME_BACK_MS = 500

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class _Waiting:
    operations: Sequence[metastore_pb2.Operation]
    conditions: Sequence[metastore_pb2.Condition]
    size_bytes: int
    revision: "asyncio.Future[int]"


@asynccontextmanager
async def running_engine(
    files: Files, new_salt: bytes, store: Store | None = None
) -> AsyncIterator["Engine"]:
    """Replay the log in `files` into an empty `store`, and take writes while the block runs.

    At the end what was queued is still committed. `new_salt` is random, for a log that is new.
    Raises LogDamagedError for a log with damage, OSError when the disk refuses.
    """
    store = store if store is not None else Store()
    recovered = await asyncio.to_thread(
        open_wal, files, new_salt, lambda payload: replay(store, payload)
    )
    engine = Engine(store, recovered)
    _log.info("log replayed", revision=store.revision, keys=len(store), bytes=engine.log_bytes)
    committing = asyncio.create_task(engine.commit_until_stopped())
    try:
        yield engine
    finally:
        engine.stop()
        await committing


def replay(store: Store, payload: bytes) -> None:
    """Apply a frame's payload. Raises ValueError if it cannot follow what the store holds."""
    try:
        commit = log_pb2.Commit.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"the frame holds no commit: {error}") from error
    draft = Draft(store)
    for batch in commit.batches:
        if batch.revision != draft.revision + 1:
            raise ValueError(f"revision {batch.revision} follows revision {draft.revision}")
        draft.add(batch.operations)
    store.apply(draft.changes)


class Engine:
    """A durable store. `store` is for reading only, and holds nothing that is not on disk.

    `ended` is set once writes are refused; `read_only_reason` then says why. `watching` counts the
    open watches, which leave when `stopping` is set.
    """

    def __init__(self, store: Store, recovered: Recovered) -> None:
        self.store = store
        self.dropped_tail_bytes = recovered.dropped_tail_bytes
        self.read_only_reason = ""
        self.ended = asyncio.Event()
        self.watching = 0
        self.stopping = asyncio.Event()
        self._wal = recovered.wal
        self._queue: deque[_Waiting] = deque()
        self._queue_bytes = 0
        self._wake = asyncio.Event()
        self._news = asyncio.Event()

    @property
    def log_bytes(self) -> int:
        """Bytes of the log that are on disk."""
        return self._wal.size_bytes

    async def write(
        self,
        operations: Sequence[metastore_pb2.Operation],
        conditions: Sequence[metastore_pb2.Condition] = (),
    ) -> int:
        """Apply a checked batch and return its revision once it is on disk.

        Raises ConditionFailedError (nothing changed), or MetastoreUnavailableError when the disk
        refuses: then the batch may or may not be there after a restart.
        """
        size_bytes = sum(operation.ByteSize() for operation in operations)
        self._check_room(size_bytes)
        revision: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(operations, conditions, size_bytes, revision))
        self._queue_bytes += size_bytes
        self._wake.set()
        return await revision

    async def wait_after(self, revision: int) -> None:
        """Return once the store has left `revision`, or is stopping."""
        while self.store.revision == revision and not self.stopping.is_set():
            await self._news.wait()

    def end_watches(self) -> None:
        """Ask every watch to end; one that begins later ends at once."""
        self.stopping.set()
        self._tell()

    def stop(self) -> None:
        """Take no more writes."""
        self._end("the metastore is stopping")
        self._wake.set()

    async def commit_until_stopped(self) -> None:
        """Commit what is written until `stop`, and then what was queued before it."""
        try:
            while self._queue or not self.ended.is_set():
                await self._wake.wait()
                self._wake.clear()
                while self._queue:
                    await self._commit(self._next_group())
        finally:
            self._end("the metastore stopped writing; its log says why")
            self._settle(list(self._queue), [])

    async def _commit(self, group: list[_Waiting]) -> None:
        draft = Draft(self.store)
        outcomes: list[int | KvplaneError] = []
        try:
            drafted = [_add(draft, waiting) for waiting in group]
            if draft.changes:
                batches = [
                    log_pb2.Batch(revision=outcome, operations=waiting.operations)
                    for waiting, outcome in zip(group, drafted, strict=True)
                    if isinstance(outcome, int)
                ]
                await asyncio.to_thread(self._append, batches)
                self.store.apply(draft.changes)
                self._tell()
            outcomes = drafted
        except OSError as error:
            _log.error("the disk refused a write; the store is read-only", why=str(error))
            self._end(f"the disk refused a write ({error}); mend it and restart the metastore")
        except Exception:  # noqa: BLE001 - whoever waits must be answered, whatever it was
            _log.exception("a write failed; the store is read-only")
            self._end("a write failed unexpectedly; the metastore's log says how")
        finally:
            self._settle(group, outcomes)

    def _append(self, batches: list[log_pb2.Batch]) -> None:
        self._wal.append(log_pb2.Commit(batches=batches).SerializeToString())

    def _settle(self, group: list[_Waiting], outcomes: list[int | KvplaneError]) -> None:
        for place, waiting in enumerate(group):
            if waiting.revision.done():
                continue
            outcome = outcomes[place] if outcomes else self._refusal()
            if isinstance(outcome, int):
                waiting.revision.set_result(outcome)
            else:
                waiting.revision.set_exception(outcome)

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size_bytes = 0
        while self._queue and size_bytes < GROUP_BYTES:
            waiting = self._queue.popleft()
            self._queue_bytes -= waiting.size_bytes
            # A caller that gave up before its batch was begun did not write.
            if not waiting.revision.done():
                size_bytes += waiting.size_bytes
                group.append(waiting)
        return group

    def _check_room(self, size_bytes: int) -> None:
        if self.ended.is_set():
            raise self._refusal()
        if self._queue_bytes + size_bytes > QUEUE_BYTES:
            raise MetastoreUnavailableError(
                f"{self._queue_bytes} bytes of batches wait for the disk, the limit is "
                f"{QUEUE_BYTES}; try again",
                retry_after_ms=_COME_BACK_MS,
                measured=self._queue_bytes,
                limit=QUEUE_BYTES,
            )

    def _refusal(self) -> MetastoreUnavailableError:
        return MetastoreUnavailableError(f"the store is read-only: {self.read_only_reason}")

    def _end(self, reason: str) -> None:
        self.read_only_reason = self.read_only_reason or reason
        self.ended.set()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _add(draft: Draft, waiting: _Waiting) -> int | KvplaneError:
    failed = draft.failed_condition(waiting.conditions)
    return draft.add(waiting.operations) if failed is None else _broken(failed, draft)


def _broken(condition: metastore_pb2.Condition, draft: Draft) -> ConditionFailedError:
    entry = draft.get(condition.key) or Entry(b"", 0)
    wanted = (
        "that value"
        if condition.WhichOneof("expectation") == "value"
        else f"revision {condition.mod_revision}"
    )
    found = f"revision {entry.mod_revision}" if entry.mod_revision else "no such key"
    return ConditionFailedError(
        f"{condition.key!r} should have {wanted}, but there is {found}; read it again and retry",
        mod_revision=entry.mod_revision,
    )
