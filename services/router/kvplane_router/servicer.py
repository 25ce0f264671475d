"""The router on the wire."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_common.clock import Clock
from kvplane_common.errors import RequestNotFoundError
from kvplane_common.interceptor import Context
from kvplane_router.arrivals import arrive
from kvplane_router.core import Core
from kvplane_router.dispatch import Dispatcher
from kvplane_router.wire import explanation

NAME = router_pb2.DESCRIPTOR.services_by_name["RouterService"].full_name


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Turns messages into calls of the dispatcher and back; errors are the interceptor's."""

    def __init__(
        self, core: Core, dispatcher: Dispatcher, clock: Clock, max_prompt_bytes: int
    ) -> None:
        self._core = core
        self._dispatcher = dispatcher
        self._clock = clock
        self._max_prompt_bytes = max_prompt_bytes

    async def Route(
        self, request: router_pb2.RouteRequest, context: Context
    ) -> router_pb2.RouteResponse:
        """Choose a node and hold capacity there."""
        arrival = await arrive(
            request, context.time_remaining(), self._clock, self._max_prompt_bytes
        )
        return await self._dispatcher.route(arrival, request)

    async def Release(
        self, request: router_pb2.ReleaseRequest, context: Context
    ) -> router_pb2.ReleaseResponse:
        """Give back a reservation."""
        await self._dispatcher.release(request.node_id, request.reservation_id)
        return router_pb2.ReleaseResponse()

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Choose a node, run the prompt there and stream the answer."""
        arrived_ms = self._clock.monotonic_ms()
        arrival = await arrive(
            request, context.time_remaining(), self._clock, self._max_prompt_bytes
        )
        async with aclosing(self._dispatcher.generate(arrival, request, arrived_ms)) as responses:
            async for response in responses:
                yield response

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: Context
    ) -> router_pb2.ExplainResponse:
        """Tell what was chosen for a recent request, why, and what came of it."""
        told = self._core.history.get(request.request_id)
        if told is None:
            raise RequestNotFoundError(
                f"request {request.request_id!r} is unknown or no longer remembered: the last "
                f"{self._core.history.most} requests are",
                measured=request.request_id,
                limit=self._core.history.most,
            )
        return explanation(told)
