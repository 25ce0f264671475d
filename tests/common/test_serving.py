"""Starting, telling health, and stopping without breaking running work."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from harness.probe import NAME, call, probe, start
from harness.services import health, until
from kvplane_common.channels import dial
from kvplane_common.errors import KvplaneError, UnavailableError, from_rpc
from kvplane_common.serving import serving

LIMIT_S = 20.0


async def test_health_follows_readiness_for_each_service_and_the_whole() -> None:
    async with serving("127.0.0.1:0", [NAME], probe(), 0) as server:
        for name in ("", NAME):
            assert await health(server.address, name) == "NOT_SERVING"
        await server.set_ready(True)
        for name in ("", NAME):
            assert await health(server.address, name) == "SERVING"
    assert await health(server.address) == "AWAY"


async def test_health_can_be_watched() -> None:
    async with (
        serving("127.0.0.1:0", [NAME], probe(), 0) as server,
        dial(server.address) as channel,
    ):
        request = health_pb2.HealthCheckRequest(service=NAME)
        watch = health_pb2_grpc.HealthStub(channel).Watch(request)
        states = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == states.NOT_SERVING
        await server.set_ready(True)
        assert (await watch.read()).status == states.SERVING
        watch.cancel()


async def test_reflection_lists_the_services() -> None:
    async with (
        serving("127.0.0.1:0", [NAME], probe(), 0) as server,
        dial(server.address) as channel,
    ):
        request = reflection_pb2.ServerReflectionRequest(list_services="*")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = [one async for one in stub.ServerReflectionInfo(iter([request]))]
    assert {service.name for service in answer.list_services_response.service} == {
        NAME,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_an_address_in_use_is_an_os_error_that_names_it() -> None:
    async with serving("127.0.0.1:0", [NAME], probe(), 0) as first:
        with pytest.raises(OSError, match=f"cannot listen on {first.address}"):
            async with serving(first.address, [NAME], probe(), 0):
                pass
        assert await health(first.address) == "NOT_SERVING"


async def test_a_stop_lets_running_work_end_and_takes_no_new() -> None:
    go_on = asyncio.Event()

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        await go_on.wait()
        yield b"last"

    stop = asyncio.Event()
    address = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with serving("127.0.0.1:0", [NAME], probe(unary_stream=stream), LIMIT_S) as server:
            address.set_result(server.address)
            await stop.wait()

    task = asyncio.ensure_future(serve())
    async with dial(await address) as channel:
        running = start(channel, "unary_stream", b"")
        assert await running.read() == b"first"
        stop.set()

        async def refuses() -> bool:
            return await health(address.result()) == "AWAY"

        await until(refuses)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with dial(address.result()) as late:
                await call(late, "unary_stream", b"")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        go_on.set()
        assert await running.read() == b"last"
        assert await running.read() == grpc.aio.EOF
    await task


async def test_a_call_that_meets_a_stop_reads_as_unavailable_however_grpc_ends_it() -> None:
    async def hold(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    async def answer(request: bytes, context: object) -> bytes:
        return request

    async def serve(stop: asyncio.Event, address: "asyncio.Future[str]") -> None:
        handlers = probe(unary_stream=hold, unary_unary=answer)
        async with serving("127.0.0.1:0", [NAME], handlers, 0.05) as server:
            address.set_result(server.address)
            await stop.wait()

    met: list[KvplaneError] = []
    for _ in range(20):
        stop, address = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(serve(stop, address))
        async with dial(await address) as channel:
            assert await start(channel, "unary_stream", b"").read() == b"first"
            stop.set()
            while not task.done():
                try:
                    await call(channel, "unary_unary", b"x")
                except grpc.aio.AioRpcError as error:
                    met.append(from_rpc(error))
            await task
    assert {type(error) for error in met} == {UnavailableError}


async def test_work_that_does_not_end_is_cancelled_after_the_drain() -> None:
    cancelled = asyncio.Event()

    async def stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving("127.0.0.1:0", [NAME], probe(unary_stream=stream), 0.05) as server:
        channel = dial(server.address)
        running = start(channel, "unary_stream", b"")
        assert await running.read() == b"first"
    await asyncio.wait_for(cancelled.wait(), LIMIT_S)
    with pytest.raises(grpc.aio.AioRpcError):
        await running.read()
    await channel.close()
