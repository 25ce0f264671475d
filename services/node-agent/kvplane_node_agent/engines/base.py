"""What a node agent asks of an engine, and what an engine answers."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.common.v1 import generation_pb2, prompt_pb2


@dataclass(frozen=True, slots=True)
class EngineModel:
    """One model that the engine can serve. What the engine does not tell is None, never 0."""

    name: str
    loaded: bool
    slots: int
    """Requests that it decodes side by side."""
    context_tokens: int | None = None
    """Longest prompt plus answer of one slot."""
    kv_bytes_per_token: float | None = None
    """KV cache bytes of one token, from the model's geometry."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for the engine."""

    model: str
    prompt: prompt_pb2.Prompt
    sampling: prompt_pb2.Sampling


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer, with what the engine measured. What it did not say is None."""

    finish_reason: "generation_pb2.FinishReason.ValueType"
    prompt_tokens: int | None = None
    """All tokens of the prompt, cached ones included."""
    cached_tokens: int | None = None
    """Prompt tokens that the engine says it took from its cache."""
    completion_tokens: int | None = None
    load_ms: float | None = None
    prefill_ms: float | None = None
    """Time to evaluate the uncached prompt tokens."""
    decode_ms: float | None = None


class Engine(Protocol):
    """An inference engine that somebody else runs."""

    async def describe(self) -> str:
        """Return name and version, such as "ollama 0.33.3".

        Raises EngineUnavailableError if the engine does not answer.
        """
        ...

    async def models(self) -> Sequence[EngineModel]:
        """Return the models it can serve now.

        Raises EngineUnavailableError if the engine does not answer.
        """
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[Piece | Finished, None]:
        """Run a prompt: pieces of text, then one Finished.

        The engine stops working on it as soon as the iterator is closed or its task cancelled.
        Raises, before the first piece: EngineUnavailableError (it cannot be reached or is loading),
        ModelNotFoundError, QueueFullError, InvalidRequestError (it refused the request), or
        ContextExceededError with the facts `prompt_tokens` and `context_tokens` where the engine
        tells them. After a piece: EngineFailedError.
        """
        ...

    async def close(self) -> None:
        """Close the connections to the engine."""
        ...
