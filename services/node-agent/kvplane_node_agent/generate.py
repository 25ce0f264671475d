"""The life of one request on the node."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvplane.agent.v1 import agent_pb2
from kvplane.common.v1 import generation_pb2, prompt_pb2
from kvplane_common.chains import Chain
from kvplane_common.errors import (
    EngineFailedError,
    EngineUnavailableError,
    InvalidPromptError,
    KvplaneError,
)
from kvplane_common.requests import check_model, check_prompt, check_sampling
from kvplane_node_agent.demand import Demand, text_bytes
from kvplane_node_agent.engines.base import Engine, EngineRequest, Finished, Piece
from kvplane_node_agent.node import Held, Node
from kvplane_node_agent.patience import GONE_S

Response = agent_pb2.GenerateResponse


class Generation:
    """Runs requests: admission, engine, settlement."""

    def __init__(self, node: Node, assumed_output_tokens: int) -> None:
        self._node = node
        self._assumed_output_tokens = assumed_output_tokens

    async def run(self, request: agent_pb2.GenerateRequest) -> AsyncGenerator[Response, None]:
        """Yield the admission, the pieces of the answer, and the completion.

        Closed or cancelled at any point, it closes the engine's answer and gives slot and blocks
        back. Raises what AgentService.Generate tells.
        """
        arrived_ms = self._node.clock.monotonic_ms()
        check_model(request.model)
        check_prompt(request.prompt)
        check_sampling(request.sampling)
        held = await self._obtain(request)
        with self._node.using(held.lease):
            yield Response(admission=held.to_proto())
            answer = _Answer(self._node, held, arrived_ms)
            async with aclosing(answer.pieces(request)) as pieces:
                async for piece in pieces:
                    yield Response(delta=generation_pb2.Delta(text=piece.text))
            completion = answer.finish()
        yield Response(completion=completion)

    def demand(
        self, model: str, chain: prompt_pb2.Chain, prompt_bytes: int | None, max_tokens: int | None
    ) -> Demand:
        """Return what a request needs. For one whose prompt is not there yet the chain speaks.

        Raises InvalidPromptError for a malformed chain.
        """
        known = checked_chain(chain)
        if prompt_bytes is None and known is not None:
            prompt_bytes = known.length_bytes
        return Demand(
            model=model,
            chain=known,
            prompt_bytes=prompt_bytes,
            output_tokens=max_tokens or self._assumed_output_tokens,
        )

    async def _obtain(self, request: agent_pb2.GenerateRequest) -> Held:
        sampling = request.sampling
        max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else None
        prompt_bytes = text_bytes(request.prompt)
        demand = self.demand(request.model, request.chain, prompt_bytes, max_tokens)
        if request.reservation_id:
            return await self._node.use(request.reservation_id, demand)
        return await self._node.admit(demand)


class _Answer:
    """One answer, from its admission to its end."""

    def __init__(self, node: Node, held: Held, arrived_ms: float) -> None:
        self._node = node
        self._held = held
        self._arrived_ms = arrived_ms
        self._admitted_ms = node.clock.monotonic_ms()
        self._epoch = node.ledger.epoch
        self._ttft_ms: float | None = None
        self._finished: Finished | None = None

    async def pieces(self, request: agent_pb2.GenerateRequest) -> AsyncGenerator[Piece, None]:
        """Yield the engine's pieces, and keep its last word for `finish`.

        Raises EngineFailedError after the first piece, for whatever reason the engine failed.
        """
        engine = self._node.engine
        if engine is None:
            raise EngineUnavailableError("the engine went away; retry later or on another node")
        try:
            async with aclosing(_run(engine, request)) as events:
                while (event := await self._next(events)) is not None:
                    if isinstance(event, Finished):
                        self._finished = event
                        return
                    self._begin()
                    yield event
        except KvplaneError as error:
            if isinstance(error, EngineFailedError | EngineUnavailableError):
                self._node.look_now.set()
            raise self._as_seen(error) from error
        raise self._as_seen(EngineUnavailableError("the engine ended its answer without an end"))

    def finish(self) -> generation_pb2.Completion:
        """Settle the request, and return what it cost."""
        finished = self._finished
        assert finished is not None, "the answer has not ended"
        service_ms = self._node.clock.monotonic_ms() - self._admitted_ms
        usage = self._node.finish(self._held.lease, finished, self._epoch, service_ms)
        return generation_pb2.Completion(
            finish_reason=finished.finish_reason,
            usage=usage,
            timings=generation_pb2.Timings(
                queue_ms=self._held.queue_ms,
                load_ms=finished.load_ms,
                prefill_ms=finished.prefill_ms,
                decode_ms=finished.decode_ms,
                ttft_ms=self._ttft_ms,
            ),
        )

    async def _next(
        self, events: AsyncGenerator[Piece | Finished, None]
    ) -> Piece | Finished | None:
        try:
            return await self._node.patience.wait_for(anext(events, None))
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"the engine does not answer, and has said nothing for {GONE_S:g} s"
            ) from error

    def _begin(self) -> None:
        if self._ttft_ms is None:
            self._ttft_ms = self._node.clock.monotonic_ms() - self._arrived_ms
            self._node.answering(self._held.lease)

    def _as_seen(self, error: KvplaneError) -> KvplaneError:
        begun = self._ttft_ms is not None
        if begun and not isinstance(error, EngineFailedError):
            return EngineFailedError(f"the answer broke off: {error}")
        if not begun and isinstance(error, EngineFailedError):
            return EngineUnavailableError(f"the engine failed before it answered: {error}")
        return error


def _run(
    engine: Engine, request: agent_pb2.GenerateRequest
) -> AsyncGenerator[Piece | Finished, None]:
    asked = EngineRequest(request.model, request.prompt, request.sampling)
    return engine.generate(asked)


def checked_chain(chain: prompt_pb2.Chain) -> Chain | None:
    """Return a chain from the wire, or None for an absent one; raises InvalidPromptError."""
    try:
        return Chain.from_proto(chain)
    except ValueError as error:
        raise InvalidPromptError(f"chain: {error}", field="chain") from error
