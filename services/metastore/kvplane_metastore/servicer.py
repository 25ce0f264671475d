"""MetastoreService on the wire."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from kvplane.metastore.v1 import metastore_pb2, metastore_pb2_grpc
from kvplane_common.errors import UnsupportedError
from kvplane_common.interceptor import Context
from kvplane_metastore.checks import check_batch, checked_range
from kvplane_metastore.engine import Engine
from kvplane_metastore.watching import watch

REPLY_BYTES = 8 * 1024 * 1024
"""A reply takes no further key once it holds this many bytes."""


class MetastoreServicer(metastore_pb2_grpc.MetastoreServiceServicer):
    """Answers from `engine`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Range(
        self, request: metastore_pb2.RangeRequest, context: Context
    ) -> metastore_pb2.RangeResponse:
        """Read a range, or as much of it as one reply takes."""
        store = self._engine.store
        reply = metastore_pb2.RangeResponse(revision=store.revision)
        size_bytes = 0
        for key, entry in store.between(checked_range(request.key, request.range_end)):
            full = size_bytes >= REPLY_BYTES
            if full or (request.limit and len(reply.kvs) == request.limit):
                reply.more = True
                break
            reply.kvs.add(key=key, value=entry.value, mod_revision=entry.mod_revision)
            size_bytes += len(key) + len(entry.value)
        return reply

    async def Write(
        self, request: metastore_pb2.WriteRequest, context: Context
    ) -> metastore_pb2.WriteResponse:
        """Apply a batch."""
        check_batch(request.operations, request.conditions)
        revision = await self._engine.write(request.operations, request.conditions)
        return metastore_pb2.WriteResponse(revision=revision)

    async def Watch(
        self, request: metastore_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[metastore_pb2.WatchResponse]:
        """Follow a range."""
        keys = checked_range(request.key, request.range_end)
        self._engine.watching += 1
        try:
            async with aclosing(watch(self._engine, keys, request.start_revision)) as steps:
                async for step in steps:
                    yield step
        finally:
            self._engine.watching -= 1

    async def Status(
        self, request: metastore_pb2.StatusRequest, context: Context
    ) -> metastore_pb2.StatusResponse:
        """Tell how the store does."""
        engine = self._engine
        return metastore_pb2.StatusResponse(
            revision=engine.store.revision,
            keys=len(engine.store),
            log_bytes=engine.log_bytes,
            dropped_tail_bytes=engine.dropped_tail_bytes,
            watchers=engine.watching,
            read_only_reason=engine.read_only_reason,
        )

    async def Snapshot(
        self, request: metastore_pb2.SnapshotRequest, context: Context
    ) -> metastore_pb2.SnapshotResponse:
        """Not in this version."""
        raise UnsupportedError("this version keeps the whole log and writes no snapshots of it")

    async def Verify(
        self, request: metastore_pb2.VerifyRequest, context: Context
    ) -> metastore_pb2.VerifyResponse:
        """Not in this version."""
        raise UnsupportedError("this version checks its log only when it starts")
