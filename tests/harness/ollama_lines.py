"""The lines that Ollama would answer with, made of what llama.cpp's server says."""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp

from harness.engines import EngineProcess

_CACHED_COUNT_SINCE = (0, 33, 3)
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "stop")


@dataclass
class Faults:
    """What goes wrong with the next answers; a test sets it, and takes it back."""

    refuse: tuple[int, str] | None = None
    """Answer with this status and error."""
    error_after: int | None = None
    """Report an error in the stream after so many pieces."""
    cut_after: int | None = None
    """End the stream after so many pieces as if it were whole, as the guard of repeats does."""


@dataclass(frozen=True)
class Asked:
    """A request for an answer, and when it came."""

    body: Mapping[str, Any]
    chat: bool
    version: str
    begun_ns: int
    load_ns: int

    def line(self, text: str, **more: Any) -> dict[str, Any]:
        """Return a line of the answer."""
        head = {"model": self.body["model"], "created_at": datetime.now(UTC).isoformat()}
        message = {"role": "assistant", "content": text}
        return head | ({"message": message} if self.chat else {"response": text}) | more

    def counts(self, timings: Mapping[str, Any]) -> dict[str, int]:
        """Return what the last line tells; a figure that is 0 is left out."""
        version = tuple(int(part) for part in self.version.split("."))
        uncached_only = version < (0, 4, 0) or version == (0, 30, 0)
        counts = {
            "total_duration": time.monotonic_ns() - self.begun_ns,
            "load_duration": self.load_ns,
            "prompt_eval_count": timings["prompt_n"] + timings["cache_n"] * (not uncached_only),
            "prompt_eval_duration": round(timings["prompt_ms"] * 1e6),
            "eval_count": timings["predicted_n"],
            "eval_duration": round(timings["predicted_ms"] * 1e6),
        }
        told = {name: count for name, count in counts.items() if count}
        if version >= _CACHED_COUNT_SINCE:
            told["prompt_eval_cached_count"] = timings["cache_n"]
        return told


async def answer(
    engine: EngineProcess, asked: Asked, faults: Faults
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the lines of an answer. A line with a "status" is an error before any other line."""
    pieces, reason = 0, ""
    async with aclosing(_events(engine, asked)) as events:
        async for event in events:
            if "error" in event:
                # It passes its child's error on as text.
                yield {"error": json.dumps(event), "status": event["error"]["code"]}
                return
            if faults.error_after == pieces:
                yield {"error": "an error was encountered while running the model"}
                return
            if faults.cut_after == pieces:
                return
            reason = _reason(event) or reason
            if text := _text(event):
                pieces += 1
                yield asked.line(text, done=False)
            if event.get("stop") or event.get("choices") == []:
                end = {"done": True, "done_reason": reason}
                yield asked.line("", **end, **asked.counts(event["timings"]))


async def _events(engine: EngineProcess, asked: Asked) -> AsyncGenerator[dict[str, Any]]:
    body, options = asked.body, asked.body.get("options", {})
    sent = {name: options[name] for name in _SAMPLING if name in options}
    sent |= {"stream": True, "cache_prompt": True}
    if asked.chat:
        path = "/v1/chat/completions"
        sent |= {"messages": body["messages"], "stream_options": {"include_usage": True}}
        sent["max_tokens"] = options.get("num_predict", -1)
    else:
        path = "/completion"
        sent |= {"prompt": body["prompt"], "n_predict": options.get("num_predict", -1)}
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(engine.url + path, json=sent) as response,
    ):
        if response.status != 200:
            yield await response.json()
            return
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


def _text(event: Mapping[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    return event.get("content") or choices[0].get("delta", {}).get("content") or ""


def _reason(event: Mapping[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    reason = event.get("stop_type") or choices[0].get("finish_reason") or ""
    return {"limit": "length", "eos": "stop", "word": "stop"}.get(reason, reason)
