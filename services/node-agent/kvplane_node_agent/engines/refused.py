"""What an engine's error may be told of it, and to whom.

An engine's message may quote the prompt. The one that tells a client what was wrong with its own
request goes to that client. Any other error is seen by operators and written to logs, and says no
more than status, type and code.
"""

import re

from kvplane_node_agent.engines.wire import parse_object

_MAX_SHOWN = 300
"""Characters of an engine's error that are passed on."""
_WORD = re.compile(r"\w[\w.-]{0,63}", re.ASCII)


class RefusedError(Exception):
    """The engine refused a request, or reported an error within its answer."""

    def __init__(self, status: int | None, body: bytes, *, within_answer: bool = False) -> None:
        super().__init__(f"the engine answered with status {status}")
        self.status = status
        """The HTTP status, or the one within an error event; None where there is none."""
        self.body = body
        self.within_answer = within_answer

    @property
    def brief(self) -> str:
        """Status, type and code, as may be logged."""
        error = (parse_object(self.body) or {}).get("error")
        details = error if isinstance(error, dict) else {}
        told = [f"status {self.status}" if self.status else "an error"]
        told += [str(details[name]) for name in ("type", "code") if name in details]
        words = dict.fromkeys(word for word in told[1:] if _WORD.fullmatch(word))
        return ", ".join([told[0], *(word for word in words if word != str(self.status))])

    @property
    def for_client(self) -> str:
        """What the client may be told of its own request: the message of a 4xx, else `brief`."""
        quotable = not self.within_answer and 400 <= (self.status or 0) < 500
        return (error_text(self.body) if quotable else "") or self.brief


def error_text(body: bytes) -> str:
    """Return what an error says, from either shape that the engines give it, cut to a line."""
    error = (parse_object(body) or {}).get("error", "")
    text = error.get("message", "") if isinstance(error, dict) else error
    return one_line(str(text))


def one_line(text: str) -> str:
    """Return `text` as one line that is not too long to show."""
    return " ".join(text.split())[:_MAX_SHOWN]
