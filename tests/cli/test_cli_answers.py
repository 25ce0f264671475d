"""The commands against services in this process that answer as each test needs it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from typer.testing import CliRunner, Result

from kvplane.common.v1 import generation_pb2, node_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane.router.v1 import router_pb2
from kvplane_cli.__main__ import app
from kvplane_common.errors import EngineFailedError, KvplaneError, RequestNotFoundError
from kvplane_common.serving import serving

Methods = dict[str, Any]
"""gRPC's handlers of a service by the method's name."""


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


@asynccontextmanager
async def _service(service: ServiceDescriptor, methods: Methods) -> AsyncIterator[str]:
    handler = grpc.method_handlers_generic_handler(service.full_name, methods)

    def register(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers([handler])

    async with serving("127.0.0.1:0", (), register, 0) as running:
        yield running.address


def _router(failure: KvplaneError | None = None) -> AbstractAsyncContextManager[str]:
    """Run a router that says a piece of an answer and then fails; it explains nothing."""

    async def generate(_: bytes, context: Any) -> AsyncIterator[Message]:
        yield router_pb2.GenerateResponse(decision=router_pb2.Decision(node_id="a"))
        yield router_pb2.GenerateResponse(delta=generation_pb2.Delta(text="Once upon"))
        if failure:
            raise failure
        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def explain(_: bytes, context: Any) -> Message:
        raise RequestNotFoundError("it is unknown")

    methods: Methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate, response_serializer=_bytes),
        "Explain": grpc.unary_unary_rpc_method_handler(explain),
    }
    return _service(router_pb2.DESCRIPTOR.services_by_name["RouterService"], methods)


def _registry(
    forgotten: list[tuple[str, int]] | None = None,
) -> AbstractAsyncContextManager[str]:
    """Run a registry that knows a live node and a lost one, and notes what it is to forget."""

    async def list_nodes(_: bytes, context: Any) -> Message:
        states = {"a": node_pb2.Node.STATE_READY, "b": node_pb2.Node.STATE_LOST}
        nodes = [node_pb2.Node(node_id=name, state=state) for name, state in states.items()]
        return registry_pb2.ListNodesResponse(nodes=nodes)

    async def deregister(request: registry_pb2.DeregisterRequest, context: Any) -> Message:
        assert forgotten is not None
        forgotten.append((request.node_id, request.epoch))
        return registry_pb2.DeregisterResponse()

    methods: Methods = {
        "ListNodes": grpc.unary_unary_rpc_method_handler(list_nodes, response_serializer=_bytes),
        "Deregister": grpc.unary_unary_rpc_method_handler(
            deregister,
            request_deserializer=registry_pb2.DeregisterRequest.FromString,
            response_serializer=_bytes,
        ),
    }
    return _service(registry_pb2.DESCRIPTOR.services_by_name["RegistryService"], methods)


async def _kvplane(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        pytest.param(
            EngineFailedError("the engine is gone"),
            "ENGINE_FAILED: the engine is gone",
            id="told by the router",
        ),
        pytest.param(None, "UNAVAILABLE: Socket closed", id="the router itself is gone"),
    ],
)
async def test_an_answer_that_breaks_off_is_told_on_a_line_of_its_own(
    failure: KvplaneError | None, told: str
) -> None:
    async with _router(failure) as address:
        result = await _kvplane("generate", "--model=m", "--router", address, "hi")
    assert result.exit_code == 1
    assert result.output == (
        f"Once upon\nkvplane: the answer broke off after 9 characters: {told}\n"
    )


async def test_before_the_first_request_there_is_nothing_to_explain() -> None:
    async with _router() as address:
        latest = await _kvplane("explain", "--router", address)
        named = await _kvplane("explain", "--router", address, "r1")
    assert (latest.exit_code, named.exit_code) == (1, 1)
    assert latest.stderr.startswith("kvplane: no request yet")
    assert named.stderr == "kvplane: REQUEST_NOT_FOUND: it is unknown\n"


async def test_another_service_behind_the_address_is_named() -> None:
    async with _registry() as address:
        result = await _kvplane("explain", "--router", address)
    assert result.stderr.startswith(f"kvplane: {address} answers, but is not a router")


async def test_a_node_that_is_gone_is_forgotten_whatever_its_epoch() -> None:
    forgotten: list[tuple[str, int]] = []
    async with _registry(forgotten) as address:
        result = await _kvplane("forget", "--registry", address, "b")
    assert (result.exit_code, result.stdout) == (0, "b is forgotten\n")
    assert forgotten == [("b", 0)]


@pytest.mark.parametrize(
    ("node", "why"),
    [("a", "a is alive"), ("c", "there is no node 'c'; there are: a, b")],
    ids=["a live one", "an unknown one"],
)
async def test_only_a_node_that_is_gone_is_forgotten(node: str, why: str) -> None:
    forgotten: list[tuple[str, int]] = []
    async with _registry(forgotten) as address:
        result = await _kvplane("forget", "--registry", address, node)
    assert result.exit_code == 1
    assert why in result.stderr
    assert forgotten == []
