"""What a request for an answer must look like."""

from typing import Any

import pytest

from kvplane.common.v1.prompt_pb2 import Chat, Message, Prompt, Sampling
from kvplane_common.errors import InvalidPromptError, InvalidRequestError, InvalidSamplingError
from kvplane_common.requests import check_model, check_prompt, check_sampling

SECRET = "what nobody may read in a log"
ASK = Message(role="user", content=SECRET)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("llama3:8b", True), ("hf.co/some one/model:Q4", True), ("", False), ("a\nb", False),
        ("m" * 256, True), ("m" * 257, False),
    ],
)  # fmt: skip
def test_a_models_name_is_short_and_printable(name: str, good: bool) -> None:
    if good:
        check_model(name)
        return
    with pytest.raises(InvalidRequestError, match="model"):
        check_model(name)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (Prompt(text=SECRET), None),
        (Prompt(chat=Chat(messages=[ASK])), None),
        (Prompt(chat=Chat(messages=[ASK, Message(role="assistant")])), None),
        (Prompt(chat=Chat(messages=[Message(role="user")])), "prompt.chat.messages"),
        (Prompt(), "prompt"),
        (Prompt(text=""), "prompt.text"),
        (Prompt(chat=Chat()), "prompt.chat.messages"),
        (
            Prompt(chat=Chat(messages=[Message(role="user"), Message(content=SECRET)])),
            "prompt.chat.messages[1].role",
        ),
    ],
    ids=[
        "a text", "a chat", "one empty message", "nothing but empty messages", "nothing", "no text",
        "no messages", "no role",
    ],
)  # fmt: skip
def test_a_prompt_asks_something(prompt: Prompt, field: str | None) -> None:
    if field is None:
        check_prompt(prompt)
        return
    with pytest.raises(InvalidPromptError) as caught:
        check_prompt(prompt)
    assert caught.value.facts["field"] == field
    assert field in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "top_k": 1, "seed": 0, "stop": ["."]},
    ],
    ids=["none", "all at their bounds"],
)
def test_sampling_within_its_ranges_is_good(options: dict[str, Any]) -> None:
    check_sampling(Sampling(**options))


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens", "at least 1"),
        ({"max_tokens": -5}, "sampling.max_tokens", "at least 1"),
        ({"temperature": -0.1}, "sampling.temperature", "from 0 up"),
        ({"temperature": float("nan")}, "sampling.temperature", "from 0 up"),
        ({"temperature": float("inf")}, "sampling.temperature", "from 0 up"),
        ({"top_p": 0.0}, "sampling.top_p", "over 0 and at most 1"),
        ({"top_p": 1.5}, "sampling.top_p", "over 0 and at most 1"),
        ({"top_k": 0}, "sampling.top_k", "at least 1"),
        ({"stop": ["a", ""]}, "sampling.stop[1]", "1 byte or more"),
    ],
    ids=str,
)
def test_sampling_out_of_range_tells_field_value_and_range(
    options: dict[str, Any], field: str, allowed: str
) -> None:
    with pytest.raises(InvalidSamplingError) as caught:
        check_sampling(Sampling(**options))
    assert caught.value.facts["field"] == field
    assert field in str(caught.value)
    assert allowed in str(caught.value)
