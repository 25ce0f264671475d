"""Ollama's own dialect, without I/O: what is sent, and what its lines mean."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.common.v1 import generation_pb2, prompt_pb2
from kvplane_common.errors import (
    ContextExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    KvplaneError,
    ModelNotFoundError,
    QueueFullError,
)
from kvplane_node_agent.engines.base import EngineRequest, Finished, Piece
from kvplane_node_agent.engines.figures import Figures
from kvplane_node_agent.engines.refused import RefusedError, error_text
from kvplane_node_agent.engines.transport import BrokenStreamError
from kvplane_node_agent.engines.wire import (
    Told,
    context_facts,
    messages,
    not_understood,
    options,
    parse_object,
)

_BUSY_RETRY_MS = 1_000
_NS_PER_MS = 1e6
_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}
_TOO_LONG = re.compile(
    r"exceeds? the (available )?context|longer than the context|exceed_context", re.I
)


def request_for(request: EngineRequest, context_tokens: int | None) -> tuple[str, dict[str, Any]]:
    """Return path and body: /api/generate for plain text, /api/chat for a chat.

    `context_tokens` becomes num_ctx. It must be the same each time: Ollama loads the model again
    for another, and the cache is gone.
    """
    body: dict[str, Any] = {
        "model": request.model,
        "stream": True,
        # Otherwise an overlong prompt is silently cut, and another one answered.
        "truncate": False,
        "options": _options(request.sampling, context_tokens),
    }
    if request.prompt.WhichOneof("kind") == "text":
        return "/api/generate", body | {"prompt": request.prompt.text, "raw": True}
    return "/api/chat", body | {"messages": messages(request.prompt.chat)}


def _options(sampling: prompt_pb2.Sampling, context_tokens: int | None) -> dict[str, Any]:
    chosen = options(sampling)
    if sampling.HasField("max_tokens"):
        chosen["num_predict"] = sampling.max_tokens
    if context_tokens is not None:
        chosen["num_ctx"] = context_tokens
    return chosen


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that Ollama has on its machine and can answer with."""

    name: str
    """With its tag."""
    digest: str
    """Names the model's content; empty where it is not told."""


def listed_models(reply: object) -> list[ListedModel]:
    """Return the models of an answer to /api/tags that run on that machine and generate text.

    Raises EngineUnavailableError where the answer has another shape than it must.
    """
    models = Told("/api/tags", reply).objects("models")
    return [
        ListedModel(model.name("name"), model.text("digest"))
        for model in models
        if not model.text("remote_host") and _generates(model.texts("capabilities"))
    ]


def loaded_contexts(reply: object) -> dict[str, int | None]:
    """Return the context, in tokens, of each model that an answer to /api/ps says is loaded.

    Raises EngineUnavailableError where the answer has another shape than it must.
    """
    models = Told("/api/ps", reply).objects("models")
    return {model.name("name"): model.figures.count("context_length") for model in models}


def metadata_of(reply: object) -> Mapping[str, object]:
    """Return the GGUF keys of an answer to /api/show.

    Raises EngineUnavailableError where the answer has another shape than it must.
    """
    told = (reply.get("model_info") or {}) if isinstance(reply, dict) else None
    if not isinstance(told, dict):
        raise not_understood("/api/show")
    return told


def _generates(capabilities: list[str]) -> bool:
    return not capabilities or "completion" in capabilities


def counts_whole_prompt(version: str) -> bool:
    """Tell whether `prompt_eval_count` of this version counts cached prompt tokens too.

    Versions up to 0.3 and 0.30.0 count the uncached tokens only. A version that is no number, such
    as one built from source, counts as new.
    """
    numbers = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or not any(parts := tuple(map(int, numbers.groups()))):
        return True
    return parts >= (0, 4, 0) and parts != (0, 30, 0)


def refusal(error: RefusedError) -> KvplaneError:
    """Return the error of this cluster for one of Ollama's."""
    says = error_text(error.body)
    if error.status == 404:
        return ModelNotFoundError(f"Ollama does not have the model: {error.for_client}")
    if _TOO_LONG.search(says):
        return _context_exceeded(error, says)
    if error.status == 503 and "busy" in says:
        return QueueFullError(
            f"Ollama's queue is full: {error.brief}", retry_after_ms=_BUSY_RETRY_MS
        )
    if error.status == 400:
        return InvalidRequestError(f"Ollama refused the request: {error.for_client}")
    return EngineUnavailableError(f"Ollama failed: {error.brief}")


def _context_exceeded(error: RefusedError, says: str) -> ContextExceededError:
    # From 0.30 the text of the error is llama-server's own error, as JSON.
    inner = RefusedError(error.status, says.encode(), within_answer=error.within_answer)
    nested = (parse_object(inner.body) or {}).get("error")
    details = nested if isinstance(nested, dict) else {}
    told = inner if details else error
    return ContextExceededError(
        f"the prompt is too long for the model's context: {told.for_client}",
        **context_facts(details),
    )


class OllamaDecoder:
    """Reads the lines of one answer from an Ollama of a given version."""

    def __init__(self, version: str) -> None:
        self._counts_whole_prompt = counts_whole_prompt(version)

    def read(self, line: bytes) -> Iterator[Piece | Finished]:
        """Yield what a line of the stream tells."""
        if not line.strip():
            return
        event = parse_object(line)
        if event is None:
            raise BrokenStreamError("a line of the answer is not a JSON object")
        if "error" in event:
            raise RefusedError(None, line, within_answer=True)
        message = event.get("message") or {}
        text = message.get("content") or event.get("response")
        if text:
            yield Piece(text)
        elif message.get("thinking") or event.get("thinking"):
            # A thought is not part of the answer, but the prefill is over.
            yield Piece("")
        if event.get("done"):
            yield self._finished(event)

    def _finished(self, event: dict[str, Any]) -> Finished:
        figures = Figures(event)
        cached = figures.count("prompt_eval_cached_count")
        # An Ollama that reports cached tokens counts them in, whatever it calls its version.
        whole = self._counts_whole_prompt or cached is not None
        reason = str(event.get("done_reason"))
        return Finished(
            finish_reason=_REASONS.get(reason, generation_pb2.FINISH_REASON_UNSPECIFIED),
            prompt_tokens=figures.count("prompt_eval_count") if whole else None,
            cached_tokens=cached,
            completion_tokens=figures.count("eval_count"),
            load_ms=_ms(figures.duration("load_duration")),
            prefill_ms=_ms(figures.duration("prompt_eval_duration")),
            decode_ms=_ms(figures.duration("eval_duration")),
        )


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / _NS_PER_MS
