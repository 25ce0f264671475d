"""Turns an engine's stream into pieces and one end, whatever its dialect."""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from kvplane_common.errors import EngineFailedError, EngineUnavailableError, KvplaneError
from kvplane_node_agent.engines.base import Finished, Piece
from kvplane_node_agent.engines.refused import RefusedError
from kvplane_node_agent.engines.transport import BrokenStreamError, EngineHttp
from kvplane_node_agent.engines.wire import is_text


class Decoder(Protocol):
    """Reads one dialect's lines; one decoder an answer."""

    def read(self, line: bytes) -> Iterable[Piece | Finished]:
        """Return what the line tells.

        Raises RefusedError if it reports an error, BrokenStreamError if it makes no sense.
        """
        ...


async def answer(
    http: EngineHttp,
    path: str,
    body: Mapping[str, Any],
    decoder: Decoder,
    refusal: Callable[[RefusedError], KvplaneError],
) -> AsyncGenerator[Piece | Finished]:
    """POST `body` to `path` and yield the answer: pieces, then one Finished.

    Before the first piece an error is what `refusal` makes of it, or EngineUnavailableError; after
    it, EngineFailedError.
    """
    begun = False
    try:
        async with http.stream(path, body) as lines:
            async for line in lines:
                for event in _understood(decoder, line):
                    begun = begun or isinstance(event, Piece)
                    yield event
                    if isinstance(event, Finished):
                        return
        raise BrokenStreamError("the answer ended without saying that it was whole")
    except RefusedError as error:
        if not begun:
            raise refusal(error) from error
        raise EngineFailedError(f"the engine failed within its answer: {error.brief}") from error
    except BrokenStreamError as error:
        kind = EngineFailedError if begun else EngineUnavailableError
        raise kind(f"the engine at {http.shown}: {error}") from error


def _understood(decoder: Decoder, line: bytes) -> Iterator[Piece | Finished]:
    """Yield what a line tells. Raises BrokenStreamError where it has another shape than it must."""
    try:
        for event in decoder.read(line):
            if isinstance(event, Piece) and not is_text(event.text):
                raise BrokenStreamError("a piece of the answer is not a text")
            yield event
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BrokenStreamError("an event of the answer is not understood") from error
