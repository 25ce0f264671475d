"""Builds the chain of a canonical prompt."""

from collections.abc import Iterator
from hashlib import blake2b

from kvplane_common.chains import DIGEST_BYTES, Chain
from kvplane_router.canonical import Canonical

STEP_BYTES = 256
"""A digest is taken at every multiple of so many canonical bytes, about sixty tokens of English."""


def build(prompt: Canonical) -> Chain:
    """Return the running digests of `prompt` at every step and at the end of every part.

    No digest is taken within the seed: one there would be shared by models with like names.
    """
    running = blake2b(prompt.seed, digest_size=DIGEST_BYTES)
    end = len(prompt.seed)
    digests: list[bytes] = []
    ends: list[int] = []
    for part in prompt.parts:
        for piece in _pieces(part, end):
            running.update(piece)
            end += len(piece)
            digests.append(running.digest())
            ends.append(end)
    return Chain(tuple(digests), tuple(ends))


def _pieces(part: bytes, start: int) -> Iterator[memoryview]:
    """Cut `part`, which begins at canonical byte `start`, at every step."""
    view = memoryview(part)
    while view:
        length = STEP_BYTES - start % STEP_BYTES
        yield view[:length]
        start += len(view[:length])
        view = view[length:]
