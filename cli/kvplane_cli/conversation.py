"""What the fleet is asked: a prompt, a conversation from a file, or both."""

import json
import sys
from collections.abc import Sequence
from typing import TextIO

import typer

from kvplane.common.v1 import prompt_pb2


def conversation(
    prompt: str | None, system: str = "", messages: TextIO | None = None
) -> prompt_pb2.Prompt:
    """Return a system message if there is one, then `messages`, then the user's `prompt`.

    A prompt of "-" is read from standard input. Raises BadParameter where nothing is asked, or
    where `messages` is not a conversation.
    """
    if prompt is None and messages is None:
        raise typer.BadParameter("give a PROMPT, or a conversation with --messages FILE")
    if prompt == "-" and messages is sys.stdin:
        raise typer.BadParameter("standard input holds the PROMPT or the --messages, not both")
    said = [_message("system", system)] if system else []
    said += read_messages(messages) if messages else []
    said += [] if prompt is None else [_message("user", _read(prompt))]
    return prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=said))


def read_messages(file: TextIO) -> Sequence[prompt_pb2.Message]:
    """Return the messages of a JSON list of {"role", "content"}.

    Raises BadParameter that names the file and what is wrong in it.
    """
    try:
        found = json.load(file)
        if not isinstance(found, list) or not found:
            raise ValueError('it must be a JSON list of {"role": ..., "content": ...}')
        return [_checked(number, one) for number, one in enumerate(found, 1)]
    except ValueError as error:  # also of what is not JSON, or not UTF-8
        raise typer.BadParameter(f"{file.name}: {error}", param_hint="--messages") from error


def _checked(number: int, found: object) -> prompt_pb2.Message:
    if not isinstance(found, dict) or found.keys() != {"role", "content"}:
        raise ValueError(f'message {number} must have "role" and "content" and nothing else')
    role, content = found["role"], found["content"]
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"role and content of message {number} must be texts")
    return _message(role, content)


def _message(role: str, content: str) -> prompt_pb2.Message:
    return prompt_pb2.Message(role=role, content=content)


def _read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt
