"""The client of the metastore: reading, writing, following, and writing behind."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Protocol

import grpc
import structlog

from kvplane.metastore.v1 import metastore_pb2, metastore_pb2_grpc
from kvplane_common.background import pauses_s
from kvplane_common.errors import (
    InvalidRequestError,
    KvplaneError,
    MetastoreUnavailableError,
    UnavailableError,
    from_rpc,
)

MAX_KEY_BYTES = 1_024
"""Longest key, in bytes."""
MAX_VALUE_BYTES = 1024 * 1024
"""Longest value, in bytes."""
MAX_OPERATIONS = 4_096
"""Most changes in one batch."""

_PAGE_KEYS = 1_000
_CALL_S = 10.0
_LATE = grpc.StatusCode.DEADLINE_EXCEEDED
_BATCH_BYTES = 4 * 1024 * 1024

_log = structlog.get_logger(__name__)
_Step = metastore_pb2.WatchResponse


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with `prefix`.

    Raises ValueError for a prefix without such a key: an empty one, or one of 0xff bytes only.
    """
    kept = prefix.rstrip(b"\xff")
    if not kept:
        raise ValueError(f"no key comes after all keys that begin with {prefix!r}")
    return kept[:-1] + bytes((kept[-1] + 1,))


def put(key: bytes, value: bytes) -> metastore_pb2.Operation:
    """Return the operation that sets `key`."""
    return metastore_pb2.Operation(put=metastore_pb2.Put(key=key, value=value))


def delete(key: bytes) -> metastore_pb2.Operation:
    """Return the operation that removes `key`."""
    return metastore_pb2.Operation(delete=metastore_pb2.Delete(key=key))


def delete_prefix(prefix: bytes) -> metastore_pb2.Operation:
    """Return the operation that removes every key that begins with `prefix`."""
    removed = metastore_pb2.Delete(key=prefix, range_end=prefix_end(prefix))
    return metastore_pb2.Operation(delete=removed)


class MetastoreClient:
    """Reads and writes through `channel`, which stays the caller's to close.

    Every method raises the metastore's own errors, and MetastoreUnavailableError where it did not
    answer within ten seconds; a write that ended so may still have been applied.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = metastore_pb2_grpc.MetastoreServiceStub(channel)

    async def range(self, prefix: bytes) -> tuple[list[metastore_pb2.KeyValue], int]:
        """Return every key that begins with `prefix`, in order, and the revision to watch from.

        The pages of a large range may be of later revisions than the one returned, so a watch
        from it tells some changes again but misses none.
        """
        kvs: list[metastore_pb2.KeyValue] = []
        key, revision, more = prefix, None, True
        while more:
            page = await self._page(key, prefix_end(prefix))
            revision = page.revision if revision is None else revision
            kvs += page.kvs
            more = page.more
            key = kvs[-1].key + b"\x00" if kvs else key
        return kvs, revision or 0

    async def _page(self, key: bytes, end: bytes) -> metastore_pb2.RangeResponse:
        request = metastore_pb2.RangeRequest(key=key, range_end=end, limit=_PAGE_KEYS)
        try:
            return await self._stub.Range(request, timeout=_CALL_S)
        except grpc.aio.AioRpcError as error:
            raise _error(error) from error

    async def write(
        self,
        operations: Sequence[metastore_pb2.Operation],
        conditions: Sequence[metastore_pb2.Condition] = (),
    ) -> int:
        """Apply a batch, all of it or nothing, and return its revision once it is on disk."""
        request = metastore_pb2.WriteRequest(operations=operations, conditions=conditions)
        try:
            return (await self._stub.Write(request, timeout=_CALL_S)).revision
        except grpc.aio.AioRpcError as error:
            raise _error(error) from error

    async def follow(self, prefix: bytes) -> AsyncGenerator[metastore_pb2.WatchResponse, None]:
        """Yield the steps of a watch over `prefix` for ever, across lost connections.

        After a loss it resumes with what came later, or with RESET and a snapshot. Raises
        InvalidRequestError for a prefix that the metastore refuses, and nothing else. Close it
        (`contextlib.aclosing`) where it is left before its task ends.
        """
        seen, pauses, lost = 0, pauses_s(), False
        while True:
            why = "the metastore ended the watch"
            try:
                async with aclosing(self._watch(prefix, seen)) as steps:
                    async for step in steps:
                        if lost:
                            _log.info("following the metastore again", revision=step.revision)
                        pauses, lost = pauses_s(), False
                        # A half-received snapshot cannot be resumed: begin again with a whole one.
                        whole = step.kind in (_Step.KIND_SYNCED, _Step.KIND_CHANGES)
                        seen = step.revision if whole else 0
                        yield step
            except InvalidRequestError:
                raise
            except KvplaneError as error:
                why = str(error)
            if not lost:
                _log.warning("lost the metastore", prefix=prefix.decode(errors="replace"), why=why)
            lost = True
            await asyncio.sleep(next(pauses))

    async def _watch(
        self, prefix: bytes, start_revision: int
    ) -> AsyncGenerator[metastore_pb2.WatchResponse, None]:
        request = metastore_pb2.WatchRequest(
            key=prefix, range_end=prefix_end(prefix), start_revision=start_revision
        )
        call = self._stub.Watch(request)
        try:
            async for step in call:
                yield step
        except grpc.aio.AioRpcError as error:
            raise _error(error) from error
        finally:
            call.cancel()


def _error(error: grpc.aio.AioRpcError) -> KvplaneError:
    known = from_rpc(error)
    if type(known) is UnavailableError or error.code() is _LATE:
        return MetastoreUnavailableError(f"the metastore does not answer: {error.details()}")
    return known


class Writer(Protocol):
    """What takes batches; a MetastoreClient does."""

    async def write(self, operations: Sequence[metastore_pb2.Operation]) -> int:
        """Apply a batch, all of it or nothing. Raises KvplaneError."""
        ...


_Changes = dict[tuple[bool, bytes], Sequence[metastore_pb2.Operation]]
"""What is to be done to each key, or with True to each prefix."""


class WriteBehind:
    """Writes records that may lag behind: the caller never waits, `run` writes in the background.

    Only the last change of a key is kept, with the put that a removal overtook, and a prefix's
    removal forgets what was pending under it. So memory is that of each key the caller writes,
    `max_pending` at most; beyond that (a metastore that is away for long) the oldest change is
    dropped and counted in `dropped`.
    """

    def __init__(self, client: Writer, *, every_s: float = 0.05, max_pending: int = 65_536) -> None:
        self.dropped = 0
        self._client = client
        self._every_s = every_s
        self._max_pending = max_pending
        # In the order of writing. The flag tells a prefix from a key of the same bytes.
        self._pending: _Changes = {}
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    @property
    def pending(self) -> int:
        """How many changes wait to be written."""
        return len(self._pending)

    def put(self, key: bytes, value: bytes) -> None:
        """Set `key` soon. What the metastore would refuse for its size is dropped and logged."""
        if not 1 <= len(key) <= MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            self.dropped += 1
            _log.error("record too large", key_bytes=len(key), value_bytes=len(value))
            return
        self._add((False, key), [put(key, value)])

    def delete(self, key: bytes) -> None:
        """Remove `key` soon.

        A put that is not written yet goes along before it: only the removal of a key that is there
        is told to those who follow, and they may have learned of it in another way.
        """
        if 1 <= len(key) <= MAX_KEY_BYTES:
            before = self._pending.get((False, key), ())
            puts = [operation for operation in before if operation.HasField("put")]
            self._add((False, key), [*puts, delete(key)])

    def delete_prefix(self, prefix: bytes) -> None:
        """Remove soon every key that begins with `prefix`, but not what is put after this call."""
        for slot in [slot for slot in self._pending if slot[1].startswith(prefix)]:
            del self._pending[slot]
        self._add((True, prefix), [delete_prefix(prefix)])

    def _add(self, slot: tuple[bool, bytes], operations: Sequence[metastore_pb2.Operation]) -> None:
        # Taken out first, so that it goes to the end: after the prefixes it must survive.
        self._pending.pop(slot, None)
        if len(self._pending) >= self._max_pending:
            if not self.dropped:
                _log.error("too many changes wait for the metastore", limit=self._max_pending)
            del self._pending[next(iter(self._pending))]
            self.dropped += 1
        self._pending[slot] = operations
        self._wake.set()

    async def run(self) -> None:
        """Write what is pending, about every 50 ms, until cancelled."""
        pauses, away = pauses_s(), False
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._every_s)
            try:
                await self._write_pending()
            except KvplaneError as error:
                if not away:
                    _log.warning("changes wait for the metastore", why=str(error))
                away = True
                await asyncio.sleep(next(pauses))
            else:
                pauses, away = pauses_s(), False

    async def flush(self, limit_s: float = 2.0) -> None:
        """Write what is pending now, for a shutdown; what is not written by `limit_s` is logged."""
        try:
            async with asyncio.timeout(limit_s):
                await self._write_pending()
        except (TimeoutError, KvplaneError) as error:
            _log.warning("changes were not written", pending=self.pending, why=str(error))

    async def _write_pending(self) -> None:
        async with self._writing:
            while self._pending:
                batch = self._batch()
                try:
                    await self._client.write(list(chain.from_iterable(batch.values())))
                except InvalidRequestError as error:
                    self.dropped += len(batch)
                    _log.error("the metastore refused changes", count=len(batch), why=str(error))
                self._forget(batch)
            self._wake.clear()

    def _batch(self) -> _Changes:
        batch: _Changes = {}
        size_bytes = count = 0
        for slot, operations in self._pending.items():
            size_bytes += sum(operation.ByteSize() for operation in operations)
            count += len(operations)
            if batch and (count > MAX_OPERATIONS or size_bytes > _BATCH_BYTES):
                break
            batch[slot] = operations
        return batch

    def _forget(self, batch: _Changes) -> None:
        for slot, operations in batch.items():
            # A key that changed while it was being written is pending again.
            if self._pending.get(slot) is operations:
                del self._pending[slot]
