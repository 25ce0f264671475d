"""Asking an engine through its adapter."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from kvplane.common.v1 import prompt_pb2
from kvplane_node_agent.engines.base import Engine, EngineRequest, Finished, Piece


@dataclass(frozen=True)
class Said:
    """A whole answer."""

    pieces: list[str]
    end: Finished


def text_request(model: str, text: str, **sampling: object) -> EngineRequest:
    """Return a request with a plain prompt, greedy unless told otherwise."""
    return EngineRequest(model, prompt_pb2.Prompt(text=text), _sampling(sampling))


def chat_request(model: str, *said: str, **sampling: object) -> EngineRequest:
    """Return a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [
        prompt_pb2.Message(role=roles[at % 2], content=text) for at, text in enumerate(said)
    ]
    prompt = prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=messages))
    return EngineRequest(model, prompt, _sampling(sampling))


async def ask(engine: Engine, request: EngineRequest) -> Said:
    """Return the whole answer."""
    events = [event async for event in engine.generate(request)]
    pieces, end = events[:-1], events[-1]
    assert isinstance(end, Finished)
    return Said([piece.text for piece in pieces if isinstance(piece, Piece)], end)


async def first_piece(events: AsyncIterator[Piece | Finished]) -> Piece:
    """Return what an answer begins with."""
    piece = await anext(events)
    assert isinstance(piece, Piece)
    return piece


def _sampling(fields: dict[str, Any]) -> prompt_pb2.Sampling:
    defaults: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    set_fields = {name: value for name, value in (defaults | fields).items() if value is not None}
    return prompt_pb2.Sampling(**set_fields)
