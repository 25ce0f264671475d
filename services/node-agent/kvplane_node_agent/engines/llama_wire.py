"""llama-server's dialect, without I/O: what is sent, and what its lines mean."""

import json
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

from kvplane.common.v1 import generation_pb2
from kvplane_common.errors import (
    ContextExceededError,
    EngineUnavailableError,
    InvalidRequestError,
    KvplaneError,
)
from kvplane_node_agent.engines.base import EngineRequest, Finished, Piece
from kvplane_node_agent.engines.figures import Figures
from kvplane_node_agent.engines.refused import RefusedError
from kvplane_node_agent.engines.transport import BrokenStreamError
from kvplane_node_agent.engines.wire import (
    Told,
    context_facts,
    messages,
    not_understood,
    options,
    parse_object,
)

_LOADING_RETRY_MS = 1_000
_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "eos": generation_pb2.FINISH_REASON_STOP,
    "word": generation_pb2.FINISH_REASON_STOP,
    "tool_calls": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
    "limit": generation_pb2.FINISH_REASON_LENGTH,
}


def request_for(request: EngineRequest) -> tuple[str, dict[str, Any]]:
    """Return path and body: /completion for plain text, /v1/chat/completions for a chat."""
    body: dict[str, Any] = {
        "stream": True,
        "cache_prompt": True,
        # Without progress events the engine notices a closed connection only after the prefill.
        "return_progress": True,
        **options(request.sampling),
    }
    most = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else -1
    if request.prompt.WhichOneof("kind") == "text":
        # The fields that the end of an answer is asked for: all of them would repeat the prompt.
        fields = ["stop", "stop_type", "content", "timings", "tokens_evaluated"]
        text = {"prompt": request.prompt.text, "n_predict": most, "response_fields": fields}
        return "/completion", body | text
    chat = {
        "model": request.model,
        "messages": messages(request.prompt.chat),
        "max_tokens": most,
        "stream_options": {"include_usage": True},
    }
    return "/v1/chat/completions", body | chat


def listed_names(listing: object, props: Told) -> list[str]:
    """Return the names of the one model, its own first, from /v1/models or else from /props.

    Raises EngineUnavailableError where the answers have another shape than they must.
    """
    models = Told("/v1/models", listing).objects("data")
    told = models[0].text("id") if models else ""
    path = PurePath(props.text("model_path")).name
    name = told or props.text("model_alias") or path
    if not name:
        raise not_understood("/v1/models")
    aliases = models[0].texts("aliases") if models else []
    return [name, *aliases]


def refusal(error: RefusedError) -> KvplaneError:
    """Return the error of this cluster for one of llama-server's."""
    details = (parse_object(error.body) or {}).get("error")
    details = details if isinstance(details, dict) else {}
    if details.get("type") == "exceed_context_size_error":
        return ContextExceededError(
            f"the prompt is too long for the model's context: {error.for_client}",
            **context_facts(details),
        )
    if error.status == 503:
        return EngineUnavailableError(
            f"the engine is not ready: {error.brief}", retry_after_ms=_LOADING_RETRY_MS
        )
    if error.status in (400, 422, 501):
        return InvalidRequestError(f"the engine refused the request: {error.for_client}")
    return EngineUnavailableError(f"the engine failed: {error.brief}")


class LlamaDecoder:
    """Reads the server-sent events of one answer, of either route."""

    def __init__(self) -> None:
        self._reason: object = ""
        self._timings: object = None
        self._usage: object = None

    def read(self, line: bytes) -> Iterable[Piece | Finished]:
        """Return what a line of the stream tells; comments and empty lines tell nothing."""
        name, _, data = line.strip().partition(b":")
        data = data.strip()
        if name not in (b"data", b"error") or not data:
            return ()
        if data == b"[DONE]":
            return (self._finished(),)
        event = parse_object(data)
        if event is None:
            raise BrokenStreamError("an event of the answer is not a JSON object")
        if name == b"error" or "error" in event:
            raise _event_error(event)
        return self._chat(event) if "choices" in event else self._completion(event)

    def _completion(self, event: dict[str, Any]) -> Iterator[Piece | Finished]:
        if event.get("content"):
            yield Piece(event["content"])
        if event.get("stop"):
            self._reason = event.get("stop_type", "")
            self._timings = event.get("timings")
            self._usage = {"prompt_tokens": event.get("tokens_evaluated")}
            yield self._finished()

    def _chat(self, event: dict[str, Any]) -> Iterator[Piece | Finished]:
        self._timings = event.get("timings") or self._timings
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            if delta.get("content"):
                yield Piece(delta["content"])
            elif delta.get("reasoning_content"):
                # A thought is not part of the answer, but the prefill is over.
                yield Piece("")
            self._reason = choice.get("finish_reason") or self._reason

    def _finished(self) -> Finished:
        timings, usage = Figures(self._timings), Figures(self._usage)
        cached, evaluated = timings.count("cache_n"), timings.count("prompt_n")
        prompt = usage.count("prompt_tokens")
        answer = timings.count("predicted_n")
        if cached is not None and evaluated is not None:
            prompt = cached + evaluated
        return Finished(
            finish_reason=_REASONS.get(str(self._reason), generation_pb2.FINISH_REASON_UNSPECIFIED),
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=usage.count("completion_tokens") if answer is None else answer,
            prefill_ms=timings.duration("prompt_ms"),
            decode_ms=timings.duration("predicted_ms"),
        )


def _event_error(event: dict[str, Any]) -> RefusedError:
    # An "error:" line holds the details themselves, a "data:" line wraps them.
    details = event.get("error", event)
    status = Figures(details).count("code")
    return RefusedError(status, json.dumps({"error": details}).encode(), within_answer=True)
