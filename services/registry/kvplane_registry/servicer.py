"""The registry on the wire."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from google.protobuf.duration_pb2 import Duration

from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane_common.interceptor import Context
from kvplane_registry.registry import Registry
from kvplane_registry.streams import RequestStreams

NAME = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """Turns messages into calls of the registry and back; errors are the interceptor's."""

    def __init__(self, registry: Registry, streams: RequestStreams) -> None:
        self._registry = registry
        self._streams = streams

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> registry_pb2.RegisterResponse:
        """Add a node, or take it back."""
        node = await self._registry.register(request.node)
        lease = Duration()
        lease.FromMilliseconds(int(self._registry.lease_s * 1000))
        return registry_pb2.RegisterResponse(node=node, lease_duration=lease)

    async def Heartbeat(
        self, request_iterator: AsyncIterator[registry_pb2.HeartbeatRequest], context: Context
    ) -> AsyncIterator[registry_pb2.HeartbeatResponse]:
        """Renew a lease with each message."""
        async with aclosing(self._streams.follow(request_iterator)) as beats:
            async for beat in beats:
                draining = self._registry.renew(beat).draining
                yield registry_pb2.HeartbeatResponse(draining=draining)

    async def Drain(
        self, request: registry_pb2.DrainRequest, context: Context
    ) -> registry_pb2.DrainResponse:
        """Keep new work away from a node, or let it come again."""
        node = await self._registry.drain(request.node_id, request.draining)
        return registry_pb2.DrainResponse(node=node)

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Context
    ) -> registry_pb2.DeregisterResponse:
        """Forget a node."""
        await self._registry.deregister(request.node_id, request.epoch)
        return registry_pb2.DeregisterResponse()

    async def ListNodes(
        self, request: registry_pb2.ListNodesRequest, context: Context
    ) -> registry_pb2.ListNodesResponse:
        """List the nodes."""
        return registry_pb2.ListNodesResponse(nodes=self._registry.nodes())

    async def WatchNodes(
        self, request: registry_pb2.WatchNodesRequest, context: Context
    ) -> AsyncIterator[registry_pb2.WatchNodesResponse]:
        """Follow the nodes."""
        async with aclosing(self._registry.watch()) as steps:
            async for step in steps:
                yield step
