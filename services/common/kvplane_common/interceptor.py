"""Turns a raised error into its gRPC status, for every method of a server."""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import structlog

from kvplane_common.errors import DETAILS_KEY, KvplaneError

Context = grpc.aio.ServicerContext[Any, Any]

_log = structlog.get_logger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets a servicer only raise: the status, its reason and its facts are set here."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler, whichever of the four kinds it is."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            kind = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            inner = handler.stream_stream or handler.unary_stream
            # A handler that writes to its context itself is a plain coroutine.
            wrap: Any = _streaming if inspect.isasyncgenfunction(inner) else _single
            call = wrap(inner, method)
        else:
            kind = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            inner = handler.stream_unary or handler.unary_unary
            call = _single(inner, method)
        return kind(call, handler.request_deserializer, handler.response_serializer)


def _single(inner: Callable[[Any, Context], Awaitable[Any]], method: str) -> Any:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the last stop before the wire
            await _abort(context, error, method)

    return call


def _streaming(inner: Callable[[Any, Context], AsyncGenerator[Any, None]], method: str) -> Any:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            # Closed here, so that the handler has cleaned up before its call counts as ended.
            async with aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001 - the last stop before the wire
            await _abort(context, error, method)

    return call


async def _abort(context: Context, error: Exception, method: str) -> NoReturn:
    if not isinstance(error, KvplaneError):
        _log.error("unexpected error", method=method, exc_info=error)
        error = KvplaneError(f"{method} failed unexpectedly; the server's log has the details")
    status = error.to_status()
    details = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(error.code, status.message, details)
    raise AssertionError("abort does not return")
