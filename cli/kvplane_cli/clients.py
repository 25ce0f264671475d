"""Reaching the services, and saying what went wrong there in one clear line."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import grpc

from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane.router.v1 import router_pb2_grpc
from kvplane_cli.shell import CliError
from kvplane_common.channels import dial
from kvplane_common.errors import DETAILS_KEY, KvplaneError, from_rpc
from kvplane_common.metastore import MetastoreClient

CALL_S = 10.0
"""Longest wait for the answer to a call that does not generate."""

Service = Literal["router", "registry", "metastore"]

_NOT_GRPC = "Failed parsing HTTP/2"
"""What gRPC says of a server that speaks something else."""


@asynccontextmanager
async def router(address: str) -> AsyncIterator[router_pb2_grpc.RouterServiceStub]:
    """Give the router's stub; what its calls raise in the block becomes a CliError."""
    async with _reaching("router", address) as channel:
        yield router_pb2_grpc.RouterServiceStub(channel)


@asynccontextmanager
async def registry(address: str) -> AsyncIterator[registry_pb2_grpc.RegistryServiceStub]:
    """Give the registry's stub; what its calls raise in the block becomes a CliError."""
    async with _reaching("registry", address) as channel:
        yield registry_pb2_grpc.RegistryServiceStub(channel)


@asynccontextmanager
async def metastore(address: str) -> AsyncIterator[MetastoreClient]:
    """Give the metastore's client; what its calls raise in the block becomes a CliError."""
    async with _reaching("metastore", address) as channel:
        yield MetastoreClient(channel)


async def list_nodes(address: str) -> Sequence[node_pb2.Node]:
    """Return the nodes that the registry at `address` knows, by id. Raises CliError."""
    async with registry(address) as stub:
        reply = await stub.ListNodes(registry_pb2.ListNodesRequest(), timeout=CALL_S)
        return reply.nodes


@asynccontextmanager
async def _reaching(service: Service, address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with dial(address) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            raise CliError(say(error, service, address)) from error
        except KvplaneError as error:
            # The metastore's client raises these, from what its call raised.
            call = error.__cause__
            if isinstance(call, grpc.aio.AioRpcError):
                raise CliError(say(call, service, address)) from error
            raise CliError(reason(error)) from error


def say(error: grpc.aio.AioRpcError, service: Service, address: str) -> str:
    """Return one line: what the peer told, or what can be known of a peer that told nothing."""
    if _peer_told(error):
        return reason(from_rpc(error))
    elsewhere = f"--{service} or KVPLANE_{service.upper()} names another address"
    message = error.details() or ""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED or _NOT_GRPC in message:
        return f"{address} answers, but is not a {service}; {elsewhere}."
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the {service} at {address} did not answer in time"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return (
            f"no {service} answers at {address}. Start a cluster on this machine with `kvplane up`,"
            f" or the service alone with `kvplane-{service}`; {elsewhere}."
        )
    return reason(from_rpc(error))


def reason(error: KvplaneError) -> str:
    """Return one line: the reason, the message, and when to retry where waiting helps."""
    retry = "" if error.retry_after_ms is None else f" (retry after {error.retry_after_ms:,} ms)"
    return f"{error.reason}: {error}{retry}"


def _peer_told(error: grpc.aio.AioRpcError) -> bool:
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
