"""Runs a request on the node that was chosen, and on the next best when that one fails early."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

import structlog

from kvplane.agent.v1 import agent_pb2
from kvplane.common.v1 import generation_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.clock import Clock
from kvplane_common.errors import (
    ContextExceededError,
    EngineFailedError,
    EngineUnavailableError,
    InvalidRequestError,
    KvplaneError,
    NodeUnreachableError,
)
from kvplane_common.metastore import WriteBehind
from kvplane_router.agents import Agents
from kvplane_router.core import Choice, Core
from kvplane_router.decide import Request
from kvplane_router.records import session_record
from kvplane_router.refusals import refusal_of_tried
from kvplane_router.wire import decision_to_proto

_log = structlog.get_logger(__name__)
Started = TypeVar("Started")
_Responses = AsyncGenerator[agent_pb2.GenerateResponse, None]


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer that has begun: its first delta, or its completion if it has none, and the rest."""

    first: agent_pb2.GenerateResponse
    rest: _Responses


class Dispatcher:
    """The one place where requests meet nodes."""

    def __init__(
        self, core: Core, agents: Agents, store: WriteBehind, clock: Clock, max_attempts: int
    ) -> None:
        self._core = core
        self._agents = agents
        self._store = store
        self._clock = clock
        self._max_attempts = max_attempts

    async def generate(
        self, request: Request, message: router_pb2.GenerateRequest, arrived_ms: float
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """Yield the decision, the deltas and the completion.

        Raises the refusal before the decision, and EngineFailedError after it. What the request
        holds is free when the generator ends, in whichever way.
        """
        choice, answer = await self._place(request, lambda chosen: self._begin(chosen, message))
        try:
            ttft_ms = self._clock.monotonic_ms() - arrived_ms
            self._core.prefilled(choice)
            yield router_pb2.GenerateResponse(decision=decision_to_proto(choice.decision))
            async with aclosing(_whole(choice, answer)) as responses:
                async for response in responses:
                    if response.HasField("delta"):
                        yield router_pb2.GenerateResponse(delta=response.delta)
                    else:
                        completion = _timed(response.completion, answer, ttft_ms)
                        self._finish(choice, completion)
                        yield router_pb2.GenerateResponse(completion=completion)
        except EngineFailedError as error:
            self._core.failed(request, error)
            self._core.node_failed(choice, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._core.cancelled(request)
            raise
        finally:
            self._core.release(choice)
            await answer.rest.aclose()

    async def route(
        self, request: Request, message: router_pb2.RouteRequest
    ) -> router_pb2.RouteResponse:
        """Choose a node and hold capacity there. Raises the refusal."""
        choice, held = await self._place(request, lambda chosen: self._reserve(chosen, message))
        self._core.hand_out(choice, held.reservation_id)
        return router_pb2.RouteResponse(
            decision=decision_to_proto(choice.decision),
            address=choice.node.address,
            reservation_id=held.reservation_id,
            expire_time=held.expire_time,
        )

    async def release(self, node_id: str, reservation_id: str) -> None:
        """Give a reservation back; no error if it or its node is gone."""
        self._core.reservations.hand_back(node_id, reservation_id)
        node = self._core.fleet.get(node_id)
        if node is None:
            return
        try:
            await self._agents.release(node.address, reservation_id)
        except NodeUnreachableError as error:
            _log.warning("a reservation is left to lapse", node_id=node_id, why=str(error))

    async def _place(
        self, request: Request, start: Callable[[Choice], Awaitable[Started]]
    ) -> tuple[Choice, Started]:
        """Choose and start until a start succeeds, and return it; its lease is the caller's then.

        Raises the most telling error when no node is left or enough were tried.
        """
        tried: dict[str, KvplaneError] = {}
        while len(tried) < self._max_attempts:
            choice = self._core.choose(request, tried)
            try:
                return choice, await start(choice)
            except KvplaneError as error:
                self._core.release(choice)
                self._note(choice, error)
                tried[choice.node.node_id] = error
            except BaseException:
                self._core.release(choice)
                self._core.cancelled(request)
                raise
        told = refusal_of_tried(request.model, tried)
        self._core.failed(request, told)
        raise told

    def _note(self, choice: Choice, error: KvplaneError) -> None:
        """Take in why a start failed. Raises what no other node would see differently."""
        if isinstance(error, InvalidRequestError) and not isinstance(error, ContextExceededError):
            self._core.failed(choice.request, error)
            raise error
        if _is_failure(error):
            self._core.node_failed(choice, error)

    async def _begin(self, choice: Choice, message: router_pb2.GenerateRequest) -> _Answer:
        """Return the answer once it has begun. Raises KvplaneError, and then nothing was sent."""
        request = agent_pb2.GenerateRequest(
            request_id=choice.request.request_id,
            model=choice.request.model,
            prompt=message.prompt,
            sampling=message.sampling,
            chain=choice.request.chain.to_proto(),
        )
        responses = self._agents.generate(choice.node.address, request)
        try:
            async for response in responses:
                if not response.HasField("admission"):
                    return _Answer(response, responses)
            raise EngineUnavailableError(f"node {choice.node.node_id} ended without an answer")
        except BaseException:
            await responses.aclose()
            raise

    async def _reserve(
        self, choice: Choice, message: router_pb2.RouteRequest
    ) -> agent_pb2.ReserveResponse:
        limited = message.sampling.HasField("max_tokens")
        request = agent_pb2.ReserveRequest(
            # The node gives the same reservation for the same name, and every call gets its own.
            request_id=f"{choice.request.request_id[:95]}.{uuid.uuid4().hex}",
            model=choice.request.model,
            chain=choice.request.chain.to_proto(),
            max_tokens=message.sampling.max_tokens if limited else None,
        )
        return await self._agents.reserve(choice.node.address, request)

    def _finish(self, choice: Choice, completion: generation_pb2.Completion) -> None:
        session = self._core.finished(choice, completion)
        if session is not None:
            self._store.put(session.key, session_record(session))
        _log.info(
            "answered",
            request_id=choice.request.request_id,
            node_id=choice.node.node_id,
            stage=choice.decision.stage.name,
            attempts=choice.decision.attempts,
            ttft_ms=round(completion.timings.ttft_ms, 1),
        )


async def _whole(choice: Choice, answer: _Answer) -> _Responses:
    """Yield an answer to its completion. Raises EngineFailedError if it breaks off before."""
    node_id = choice.node.node_id
    try:
        yield answer.first
        if answer.first.HasField("completion"):
            return
        async for response in answer.rest:
            yield response
            if response.HasField("completion"):
                return
    except KvplaneError as error:
        raise EngineFailedError(
            f"node {node_id} failed after the answer had begun: {error}"
        ) from error
    raise EngineFailedError(f"node {node_id} ended after the answer had begun, without completion")


def _timed(
    completion: generation_pb2.Completion, answer: _Answer, ttft_ms: float
) -> generation_pb2.Completion:
    if answer.first.HasField("delta"):
        completion.timings.ttft_ms = ttft_ms
    else:
        completion.timings.ClearField("ttft_ms")
    return completion


def _is_failure(error: KvplaneError) -> bool:
    """Tell a node that cannot be trusted for now from one that answered, and refused."""
    broken = EngineUnavailableError | EngineFailedError | NodeUnreachableError
    return isinstance(error, broken) or type(error) is KvplaneError
