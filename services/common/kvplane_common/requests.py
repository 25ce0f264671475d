"""What a request for an answer must look like, and how its size is estimated.

The same for router and node agent.
"""

import math

from kvplane.common.v1 import prompt_pb2
from kvplane_common.errors import (
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
)

ROLES = ("system", "user", "assistant", "tool")
"""Who may speak in a conversation."""

DEFAULT_BYTES_PER_TOKEN = 4.0
"""English text under a current tokenizer; assumed until an engine's own counts tell better."""

MOST_BYTES_PER_TOKEN = 32.0
"""No text that makes sense has more. What is learned of one text may be far off for another (digits
take a byte a token, indented code ten), so what is refused for ever is refused by this bound alone;
anything closer the engine counts itself."""

MAX_MESSAGES = 10_000
"""Most messages of a conversation."""

MAX_MODEL_CHARACTERS = 256
_SHOWN_CHARACTERS = 40


def least_tokens(prompt_bytes: int) -> int:
    """Return the tokens that a prompt of so many bytes has at least, whatever its text."""
    return int(prompt_bytes / MOST_BYTES_PER_TOKEN)


def model_name(name: str) -> str:
    """Return a model's name without the tag that means none: "mini" for "mini:latest"."""
    return name.removesuffix(":latest")


def check_model(name: str) -> None:
    """Raise InvalidRequestError unless `name` can be the name of a model."""
    if not name:
        raise InvalidRequestError("model is empty; name the model that is to answer", field="model")
    if len(name) > MAX_MODEL_CHARACTERS or not name.isprintable():
        raise InvalidRequestError(
            f"model must be at most {MAX_MODEL_CHARACTERS} printable characters, "
            f"not {len(name)} such as {name[:_SHOWN_CHARACTERS]!r}",
            field="model",
            measured=len(name),
            limit=MAX_MODEL_CHARACTERS,
        )


def check_prompt(prompt: prompt_pb2.Prompt) -> None:
    """Raise InvalidPromptError unless `prompt` asks something; the error never quotes it."""
    kind = prompt.WhichOneof("kind")
    if kind is None:
        raise InvalidPromptError("prompt is missing; set text or chat", field="prompt")
    if kind == "text" and not prompt.text:
        raise InvalidPromptError("prompt.text is empty; give at least 1 byte", field="prompt.text")
    if kind == "chat":
        _check_chat(prompt.chat)


def _check_chat(chat: prompt_pb2.Chat) -> None:
    if not chat.messages:
        raise InvalidPromptError(
            "prompt.chat.messages has 0 messages; give at least 1",
            field="prompt.chat.messages",
            measured=0,
            limit=1,
        )
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidPromptError(
            f"prompt.chat.messages has {len(chat.messages)} messages; at most {MAX_MESSAGES} are "
            "taken: join or drop some",
            field="prompt.chat.messages",
            measured=len(chat.messages),
            limit=MAX_MESSAGES,
        )
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            field = f"prompt.chat.messages[{index}].role"
            raise InvalidPromptError(
                f"{field} is {message.role[:_SHOWN_CHARACTERS]!r}; it must be one of "
                f"{', '.join(ROLES)}",
                field=field,
            )
    if not any(message.content for message in chat.messages):
        raise InvalidPromptError(
            "prompt.chat.messages have no content; give at least 1 byte in one of them",
            field="prompt.chat.messages",
        )


def check_sampling(sampling: prompt_pb2.Sampling) -> None:
    """Raise InvalidSamplingError, naming field, value and range, unless every option is in it."""
    if sampling.HasField("max_tokens"):
        check_max_tokens(sampling.max_tokens, "sampling.max_tokens")
    if sampling.HasField("temperature"):
        value = sampling.temperature
        _require("temperature", value, math.isfinite(value) and value >= 0, "a number from 0 up")
    if sampling.HasField("top_p"):
        _require("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "over 0 and at most 1")
    if sampling.HasField("top_k"):
        _require("top_k", sampling.top_k, sampling.top_k >= 1, "at least 1")
    if "" in sampling.stop:
        _require(f"stop[{list(sampling.stop).index('')}]", "''", False, "a text of 1 byte or more")


def check_max_tokens(max_tokens: int, field: str) -> None:
    """Raise InvalidSamplingError, naming `field`, unless `max_tokens` is at least 1."""
    if max_tokens < 1:
        raise InvalidSamplingError(
            f"{field} is {max_tokens}; it must be at least 1",
            field=field,
            measured=max_tokens,
            limit=1,
        )


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        field = f"sampling.{name}"
        raise InvalidSamplingError(
            f"{field} is {value}; it must be {allowed}", field=field, measured=value, limit=allowed
        )
