"""The metastore over real gRPC, through the client that the other services use."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from harness.services import health, until
from kvplane.metastore.v1 import metastore_pb2, metastore_pb2_grpc
from kvplane_common.channels import dial
from kvplane_common.errors import (
    ConditionFailedError,
    InvalidRequestError,
    KvplaneError,
    MetastoreUnavailableError,
    UnsupportedError,
    from_rpc,
)
from kvplane_common.metastore import (
    MAX_KEY_BYTES,
    MAX_OPERATIONS,
    MAX_VALUE_BYTES,
    MetastoreClient,
    delete,
    delete_prefix,
    put,
)
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import NAME, serving_metastore
from kvplane_metastore.wal import LOG_NAME

Step = metastore_pb2.WatchResponse
Condition = metastore_pb2.Condition
Stub = metastore_pb2_grpc.MetastoreServiceStub


@asynccontextmanager
async def metastore(
    data_dir: Path, listen: str = "127.0.0.1:0", drain_s: float = 0
) -> AsyncIterator[str]:
    config = MetastoreConfig(data_dir=data_dir, listen=listen, drain_s=drain_s)
    async with serving_metastore(config) as running:
        yield running.address


@asynccontextmanager
async def connected(data_dir: Path) -> AsyncIterator[tuple[MetastoreClient, Stub]]:
    async with metastore(data_dir) as address, dial(address) as channel:
        yield MetastoreClient(channel), Stub(channel)


async def test_what_was_written_is_read_in_order_with_its_revisions(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        assert await client.range(b"a/") == ([], 0)
        assert await client.write([put(b"a/2", b"2"), put(b"a/1", b""), put(b"b", b"no")]) == 1
        assert await client.write([put(b"a/2", b"new")]) == 2
        kvs, revision = await client.range(b"a/")
        assert [(kv.key, kv.value, kv.mod_revision) for kv in kvs] == [
            (b"a/1", b"", 1),
            (b"a/2", b"new", 2),
        ]
        assert revision == 2


async def test_a_range_larger_than_a_page_and_a_message_is_read_whole(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, stub):
        await client.write([put(b"s/%04d" % i, b"") for i in range(2_500)])
        for part in range(4):
            large = [put(b"l/%d/%d" % (part, i), bytes(MAX_VALUE_BYTES)) for i in range(9)]
            await client.write(large)
        small, _ = await client.range(b"s/")
        assert [kv.key for kv in small] == [b"s/%04d" % i for i in range(2_500)]
        assert len((await client.range(b"l/"))[0]) == 36
        page = await stub.Range(metastore_pb2.RangeRequest(key=b"s/", range_end=b"s0", limit=2_500))
        assert not page.more
        page = await stub.Range(metastore_pb2.RangeRequest(key=b"s/", range_end=b"s0", limit=7))
        assert page.more
        assert len(page.kvs) == 7


async def test_a_condition_that_does_not_hold_changes_nothing(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        absent = [Condition(key=b"lock", mod_revision=0)]
        assert await client.write([put(b"lock", b"a")], absent) == 1
        with pytest.raises(ConditionFailedError, match="there is revision 1") as told:
            await client.write([put(b"lock", b"b"), put(b"other", b"")], absent)
        assert told.value.facts == {"mod_revision": "1"}
        assert await client.write([delete(b"lock")], [Condition(key=b"lock", value=b"a")]) == 2
        assert await client.range(b"o") == ([], 2)


LARGE_KEY = b"k" * (MAX_KEY_BYTES + 1)
INVALID = {
    "an empty batch": (metastore_pb2.WriteRequest(), "operations of the batch: 0"),
    "too many operations": (
        metastore_pb2.WriteRequest(operations=[put(b"k", b"")] * (MAX_OPERATIONS + 1)),
        "4097, must be 1 to 4096",
    ),
    "an operation of no kind": (
        metastore_pb2.WriteRequest(operations=[metastore_pb2.Operation()]),
        "neither a put nor a delete",
    ),
    "an empty key": (metastore_pb2.WriteRequest(operations=[put(b"", b"")]), "must be 1 to 1024"),
    "a key too long": (metastore_pb2.WriteRequest(operations=[put(LARGE_KEY, b"")]), "1025"),
    "a value too long": (
        metastore_pb2.WriteRequest(operations=[put(b"k", bytes(MAX_VALUE_BYTES + 1))]),
        "bytes of a value: 1048577",
    ),
    "a delete without a key": (metastore_pb2.WriteRequest(operations=[delete(b"")]), "is empty"),
    "a condition without a key": (
        metastore_pb2.WriteRequest(
            operations=[put(b"k", b"")], conditions=[Condition(mod_revision=0)]
        ),
        "a condition needs a key",
    ),
    "a condition without an expectation": (
        metastore_pb2.WriteRequest(operations=[put(b"k", b"")], conditions=[Condition(key=b"k")]),
        "a condition needs a key",
    ),
}


@pytest.mark.parametrize(("request_", "why"), INVALID.values(), ids=INVALID.keys())
async def test_a_batch_out_of_bounds_is_refused(
    tmp_path: Path, request_: metastore_pb2.WriteRequest, why: str
) -> None:
    async with connected(tmp_path) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match=why) as told:
            await stub.Write(request_)
        assert isinstance(from_rpc(told.value), InvalidRequestError)
        assert (await stub.Status(metastore_pb2.StatusRequest())).revision == 0


@pytest.mark.parametrize(("key", "end"), [(b"", b"b"), (b"b", b"a")], ids=["no key", "backwards"])
async def test_a_range_that_is_none_is_refused(tmp_path: Path, key: bytes, end: bytes) -> None:
    async with connected(tmp_path) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="range") as told:
            await stub.Range(metastore_pb2.RangeRequest(key=key, range_end=end))
        assert isinstance(from_rpc(told.value), InvalidRequestError)
        with pytest.raises(grpc.aio.AioRpcError, match="range") as told:
            await anext(aiter(stub.Watch(metastore_pb2.WatchRequest(key=key, range_end=end))))
        assert isinstance(from_rpc(told.value), InvalidRequestError)


async def test_what_this_version_does_not_do_says_so(tmp_path: Path) -> None:
    async with connected(tmp_path) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="no snapshots") as told:
            await stub.Snapshot(metastore_pb2.SnapshotRequest())
        assert isinstance(from_rpc(told.value), UnsupportedError)
        with pytest.raises(grpc.aio.AioRpcError, match="only when it starts") as told:
            await stub.Verify(metastore_pb2.VerifyRequest())
        assert isinstance(from_rpc(told.value), UnsupportedError)


async def test_the_status_counts_keys_bytes_and_watchers(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, stub):
        await client.write([put(b"a", b""), put(b"b", b"")])
        async with aclosing(client.follow(b"a")) as steps:
            await anext(steps)
            status = await stub.Status(metastore_pb2.StatusRequest())
            assert (status.revision, status.keys, status.watchers) == (1, 2, 1)
            assert status.log_bytes == (tmp_path / LOG_NAME).stat().st_size
            assert status.read_only_reason == ""

        async def nobody_watches() -> bool:
            return (await stub.Status(metastore_pb2.StatusRequest())).watchers == 0

        await until(nobody_watches)


async def test_a_store_that_turns_read_only_says_so_in_its_status_and_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError("no such luck")

    async def not_serving() -> bool:
        return await health(address) == "NOT_SERVING"

    async with metastore(tmp_path) as address, dial(address) as channel:
        client = MetastoreClient(channel)
        assert await health(address, NAME) == "SERVING"
        monkeypatch.setattr("os.fsync", refuse)
        with pytest.raises(MetastoreUnavailableError, match="no such luck"):
            await client.write([put(b"k", b"v")])
        status = await Stub(channel).Status(metastore_pb2.StatusRequest())
        assert "no such luck" in status.read_only_reason
        assert await client.range(b"k") == ([], 0)
        await until(not_serving)


async def test_a_metastore_that_is_not_there_is_unavailable() -> None:
    async with dial("127.0.0.1:1") as channel:
        client = MetastoreClient(channel)
        with pytest.raises(MetastoreUnavailableError, match="does not answer"):
            await client.range(b"a")
        with pytest.raises(MetastoreUnavailableError, match="does not answer"):
            await client.write([put(b"a", b"")])


def told(step: metastore_pb2.WatchResponse) -> tuple[str, list[bytes]]:
    return Step.Kind.Name(step.kind).removeprefix("KIND_"), [event.key for event in step.events]


async def test_following_goes_on_over_a_restart_without_a_new_snapshot(tmp_path: Path) -> None:
    async with asyncio.timeout(20), metastore(tmp_path) as address:
        pass
    async with (
        asyncio.timeout(20),
        dial(address) as channel,
        aclosing(MetastoreClient(channel).follow(b"a/")) as steps,
    ):
        client = MetastoreClient(channel)
        async with metastore(tmp_path, address):
            assert [told(await anext(steps))[0] for _ in range(2)] == ["RESET", "SYNCED"]
            await client.write([put(b"a/1", b"")])
            assert told(await anext(steps)) == ("CHANGES", [b"a/1"])
        async with metastore(tmp_path, address), dial(address) as other:
            await MetastoreClient(other).write([put(b"a/2", b"")])
            assert told(await anext(steps)) == ("SYNCED", [])
            assert told(await anext(steps)) == ("CHANGES", [b"a/2"])
        async with metastore(tmp_path / "emptied", address):
            assert [told(await anext(steps))[0] for _ in range(2)] == ["RESET", "SYNCED"]


async def test_open_watches_do_not_hold_up_a_stop(tmp_path: Path) -> None:
    async with asyncio.timeout(20), AsyncExitStack() as stopping:
        address = await stopping.enter_async_context(metastore(tmp_path, drain_s=60))
        async with dial(address) as channel:
            watch = Stub(channel).Watch(metastore_pb2.WatchRequest(key=b"a"))
            for kind in (Step.KIND_RESET, Step.KIND_SYNCED):
                step = await watch.read()
                assert isinstance(step, Step)
                assert step.kind == kind
            await stopping.aclose()
            assert await watch.read() == grpc.aio.EOF


async def test_following_a_prefix_that_is_refused_raises(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        with pytest.raises(ValueError, match="no key comes after"):
            await anext(client.follow(b""))


async def test_a_batch_over_a_large_prefix_reaches_watchers_whole(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _), asyncio.timeout(20):
        keys = [b"a/%04d" % i for i in range(MAX_OPERATIONS)]
        await client.write([put(key, b"") for key in keys])
        async with aclosing(client.follow(b"a/")) as steps:
            while (await anext(steps)).kind != Step.KIND_SYNCED:
                pass
            await client.write([delete_prefix(b"a/")])
            assert told(await anext(steps)) == ("CHANGES", keys)


async def test_an_address_in_use_is_an_error_that_names_it(tmp_path: Path) -> None:
    async with metastore(tmp_path / "one") as address:
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            async with metastore(tmp_path / "two", address):
                raise KvplaneError("two on one port")
