"""What the engines' dialects share."""

import json
import re
from collections.abc import Mapping
from typing import Any

from kvplane.common.v1 import prompt_pb2
from kvplane_common.errors import EngineUnavailableError
from kvplane_node_agent.engines.figures import Figures

_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


def messages(chat: prompt_pb2.Chat) -> list[dict[str, str]]:
    """Return a conversation as every engine takes it."""
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def options(sampling: prompt_pb2.Sampling) -> dict[str, Any]:
    """Return what is set of a sampling but `max_tokens`, under the names that engines use too."""
    fields = {field.name: value for field, value in sampling.ListFields()}
    fields.pop("max_tokens", None)
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    return fields


def context_facts(details: dict[str, Any]) -> dict[str, int]:
    """Return the numbers of an `exceed_context_size_error`; what it does not tell is left out."""
    figures = Figures(details)
    prompt_tokens, context_tokens = figures.count("n_prompt_tokens"), figures.count("n_ctx")
    facts = {
        "prompt_tokens": prompt_tokens,
        "context_tokens": context_tokens,
        "measured": prompt_tokens,
        "limit": context_tokens,
    }
    return {name: value for name, value in facts.items() if value is not None}


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object that `line` holds, or None where it holds something else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_text(value: object) -> bool:
    """Tell whether `value` is a text that can be sent on: JSON can write half a character."""
    return isinstance(value, str) and not _HALF_CHARACTER.search(value)


def not_understood(path: str) -> EngineUnavailableError:
    """Return the error for an answer about the engine that has another shape than it must."""
    return EngineUnavailableError(f"the engine answered {path} in a way that is not understood")


class Told:
    """One JSON object of an answer to `path`.

    Each reading raises EngineUnavailableError where the value has another type; an absent one and
    null are empty.
    """

    def __init__(self, path: str, value: object) -> None:
        """Take `value`, of whatever type."""
        if not isinstance(value, dict):
            raise not_understood(path)
        self._path = path
        self._value: Mapping[str, Any] = value

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._value.get(name)
        if value is not None and not is_text(value):
            raise not_understood(self._path)
        return value or ""

    def name(self, name: str) -> str:
        """Return a text that must be there."""
        if not (value := self.text(name)):
            raise not_understood(self._path)
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        values = self._list(name)
        if not all(map(is_text, values)):
            raise not_understood(self._path)
        return values

    def objects(self, name: str) -> "list[Told]":
        """Return a list of objects."""
        return [Told(self._path, value) for value in self._list(name)]

    def _list(self, name: str) -> list[Any]:
        values = self._value.get(name)
        if values is not None and not isinstance(values, list):
            raise not_understood(self._path)
        return values or []

    @property
    def figures(self) -> Figures:
        """Its numbers; an odd one is unknown."""
        return Figures(self._value)
