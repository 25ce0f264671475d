import io
from typing import Any

import pytest
import typer

from kvplane_cli.conversation import conversation

ASKED = '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]'


def _file(text: str) -> io.StringIO:
    file = io.StringIO(text)
    file.name = "c.json"
    return file


def _said(*asked: Any) -> list[tuple[str, str]]:
    prompt = conversation(*asked)
    return [(message.role, message.content) for message in prompt.chat.messages]


def test_the_system_message_comes_first_and_the_prompt_last() -> None:
    assert _said("why?", "be brief", _file(ASKED)) == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "yes?"),
        ("user", "why?"),
    ]


def test_a_conversation_needs_no_prompt_and_a_prompt_no_conversation() -> None:
    assert _said(None, "", _file(ASKED)) == [("user", "hi"), ("assistant", "yes?")]
    assert _said("why?") == [("user", "why?")]


def test_a_prompt_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert _said("-") == [("user", "from a pipe")]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        pytest.param("{", "c.json: Expecting property name", id="no JSON"),
        pytest.param("{}", "must be a JSON list", id="no list"),
        pytest.param("[]", "must be a JSON list", id="nothing in it"),
        pytest.param('["hi"]', "message 1 must have", id="a bare text"),
        pytest.param(ASKED[:-1] + ', {"role": "user"}]', "message 3 must have", id="no content"),
        pytest.param(
            '[{"role": "user", "content": "a", "name": "b"}]', "nothing else", id="one key more"
        ),
        pytest.param(
            '[{"role": "user", "content": ["a"]}]', "message 1 must be texts", id="not a text"
        ),
        pytest.param('[{"role": "user", "content": "\\ud800"}]', "c.json: ", id="half a character"),
    ],
)
def test_a_malformed_conversation_is_named_with_what_is_wrong(text: str, wrong: str) -> None:
    with pytest.raises(typer.BadParameter, match=wrong):
        conversation(None, "", _file(text))


def test_nothing_to_ask_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="give a PROMPT, or"):
        conversation(None)


def test_standard_input_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    piped = io.StringIO(ASKED)
    monkeypatch.setattr("sys.stdin", piped)
    with pytest.raises(typer.BadParameter, match="not both"):
        conversation("-", "", piped)
