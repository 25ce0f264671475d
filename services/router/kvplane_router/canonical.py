"""The canonical bytes of a prompt: what its chain of digests is taken over.

    prompt  = seed text | seed message*
    seed    = model FF salt FF
    text    = FC content
    message = FE role FD content FF

The bytes FC to FF never occur in UTF-8, so no content can pose as a marker, and bytes that agree up
to a marker agree in every message before it. Messages stand in the order in which the client sent
them, late system messages too.
"""

from dataclasses import dataclass

from kvplane.common.v1 import prompt_pb2

_TEXT = b"\xfc"
_CONTENT = b"\xfd"
_MESSAGE = b"\xfe"
_END = b"\xff"


@dataclass(frozen=True, slots=True)
class Canonical:
    """A prompt in canonical bytes: the seed, then parts that each end where a message does."""

    seed: bytes
    parts: tuple[bytes, ...]


def canonical(model: str, salt: str, prompt: prompt_pb2.Prompt) -> Canonical:
    """Return the canonical bytes of `prompt` for `model`, apart from those of any other `salt`."""
    seed = model.encode() + _END + salt.encode() + _END
    if prompt.WhichOneof("kind") == "text":
        return Canonical(seed, (_TEXT + prompt.text.encode(),))
    return Canonical(seed, tuple(_message(message) for message in prompt.chat.messages))


def _message(message: prompt_pb2.Message) -> bytes:
    return _MESSAGE + message.role.encode() + _CONTENT + message.content.encode() + _END
