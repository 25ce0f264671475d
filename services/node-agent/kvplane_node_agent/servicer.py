"""AgentService on the wire."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from kvplane.agent.v1 import agent_pb2, agent_pb2_grpc
from kvplane_common.chains import DIGEST_BYTES
from kvplane_common.errors import InvalidRequestError, UnsupportedError
from kvplane_common.interceptor import Context
from kvplane_common.requests import check_max_tokens, check_model, model_name
from kvplane_node_agent.generate import Generation
from kvplane_node_agent.node import Held, Node
from kvplane_node_agent.report import residency_of, timestamp

NAME = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name


class AgentServicer(agent_pb2_grpc.AgentServiceServicer):
    """Turns messages into calls of the node and back; errors are the interceptor's."""

    def __init__(self, node: Node, generation: Generation) -> None:
        self._node = node
        self._generation = generation

    async def Generate(
        self, request: agent_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[agent_pb2.GenerateResponse]:
        """Run a prompt on the engine."""
        request.model = model_name(request.model)
        async with aclosing(self._generation.run(request)) as responses:
            async for response in responses:
                yield response

    async def Forward(
        self, request: agent_pb2.ForwardRequest, context: Context
    ) -> AsyncIterator[agent_pb2.ForwardResponse]:
        """Not in this version."""
        _refuse("this version forwards no verbatim requests; use Generate")
        yield agent_pb2.ForwardResponse()

    async def Reserve(
        self, request: agent_pb2.ReserveRequest, context: Context
    ) -> agent_pb2.ReserveResponse:
        """Hold a slot and blocks."""
        request.model = model_name(request.model)
        check_model(request.model)
        max_tokens = request.max_tokens if request.HasField("max_tokens") else None
        if max_tokens is not None:
            check_max_tokens(max_tokens, "max_tokens")
        hold_ms = request.hold_duration.ToMilliseconds()
        if hold_ms < 0:
            raise InvalidRequestError(
                f"hold_duration is {hold_ms} ms; it must not be negative", field="hold_duration"
            )
        demand = self._generation.demand(request.model, request.chain, None, max_tokens)
        held = await self._node.reserve(request.request_id, demand, hold_ms)
        return agent_pb2.ReserveResponse(
            reservation_id=held.reservation_id,
            expire_time=timestamp(held.expire_wall_ms),
            admission=Held(held.lease, held.queue_ms).to_proto(),
        )

    async def Release(
        self, request: agent_pb2.ReleaseRequest, context: Context
    ) -> agent_pb2.ReleaseResponse:
        """Give a reservation back."""
        self._node.release(request.reservation_id)
        return agent_pb2.ReleaseResponse()

    async def ListResidencies(
        self, request: agent_pb2.ListResidenciesRequest, context: Context
    ) -> agent_pb2.ListResidenciesResponse:
        """List what is believed to be cached."""
        ledger, model = self._node.ledger, model_name(request.model)
        return agent_pb2.ListResidenciesResponse(
            residencies=[
                residency_of(residency, ledger.node_id)
                for residency in ledger.residencies
                if model in ("", residency.model)
            ],
            load=self._node.load(),
        )

    async def Evict(
        self, request: agent_pb2.EvictRequest, context: Context
    ) -> agent_pb2.EvictResponse:
        """Forget cached prompts that no request is using."""
        if len(request.digest) not in (0, DIGEST_BYTES):
            raise InvalidRequestError(
                f"digest has {len(request.digest)} bytes; it must have {DIGEST_BYTES}, or none",
                field="digest",
                measured=len(request.digest),
                limit=DIGEST_BYTES,
            )
        evicted = self._node.evict(model_name(request.model), request.digest)
        return agent_pb2.EvictResponse(evicted=evicted)

    async def Drain(
        self, request: agent_pb2.DrainRequest, context: Context
    ) -> agent_pb2.DrainResponse:
        """Stop admitting, or begin again."""
        self._node.set_draining(request.draining)
        return agent_pb2.DrainResponse()

    async def FetchKv(
        self, request: agent_pb2.FetchKvRequest, context: Context
    ) -> AsyncIterator[agent_pb2.FetchKvResponse]:
        """Not in this version."""
        _refuse("this version moves no KV cache between nodes")
        yield agent_pb2.FetchKvResponse()


def _refuse(why: str) -> None:
    raise UnsupportedError(why)
