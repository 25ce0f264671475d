"""What comes in, checked and chained."""

import asyncio
import uuid

from kvplane.common.v1 import prompt_pb2
from kvplane.router.v1 import router_pb2
from kvplane_common.chains import Chain
from kvplane_common.clock import Clock
from kvplane_common.errors import InvalidRequestError, PromptTooLargeError
from kvplane_common.requests import check_model, check_prompt, check_sampling, model_name
from kvplane_router.canonical import canonical
from kvplane_router.chain import build
from kvplane_router.decide import Request

MAX_ID_CHARACTERS = 128
"""Longest request id and session id."""

TENANT = "default"
"""Whose requests all are, until callers show who they are. Never taken from the request."""

_THREAD_BYTES = 64 * 1024
"""A longer prompt would hold up every other request while it is hashed on the loop."""

Message = router_pb2.RouteRequest | router_pb2.GenerateRequest


async def arrive(
    message: Message, time_left_s: float | None, clock: Clock, max_prompt_bytes: int
) -> Request:
    """Return the request of a message.

    Raises InvalidPromptError, InvalidSamplingError, PromptTooLargeError or InvalidRequestError.
    """
    arrived_ms = clock.monotonic_ms()
    model = model_name(message.model)
    _check(message, model, max_prompt_bytes)
    chain = await _chain(model, message.prompt)
    limited = message.sampling.HasField("max_tokens")
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        tenant=TENANT,
        model=model,
        chain=chain,
        session_id=message.session_id,
        answer_tokens=message.sampling.max_tokens if limited else None,
        deadline_ms=None if time_left_s is None else arrived_ms + time_left_s * 1000,
    )


def _check(message: Message, model: str, max_prompt_bytes: int) -> None:
    _check_id("request_id", message.request_id)
    _check_id("session_id", message.session_id)
    check_model(model)
    size_bytes = message.prompt.ByteSize()
    if size_bytes > max_prompt_bytes:
        raise PromptTooLargeError(
            f"the prompt has {size_bytes} bytes; at most {max_prompt_bytes} are taken: shorten it",
            measured=size_bytes,
            limit=max_prompt_bytes,
        )
    check_prompt(message.prompt)
    check_sampling(message.sampling)


def _check_id(field: str, value: str) -> None:
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(
            f"{field} has {len(value)} characters; at most {MAX_ID_CHARACTERS} are taken",
            field=field,
            measured=len(value),
            limit=MAX_ID_CHARACTERS,
        )
    if not value.isprintable():  # People read it in terminals and logs.
        raise InvalidRequestError(
            f"{field} is {value!r}; only printable characters are taken", field=field
        )


async def _chain(model: str, prompt: prompt_pb2.Prompt) -> Chain:
    if prompt.ByteSize() <= _THREAD_BYTES:
        return _chain_now(model, prompt)
    return await asyncio.to_thread(_chain_now, model, prompt)


def _chain_now(model: str, prompt: prompt_pb2.Prompt) -> Chain:
    return build(canonical(model, TENANT, prompt))
