"""Chains of running digests, as values: the router builds them, all compare and pack them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvplane.common.v1 import prompt_pb2

DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Chain:
    """The running digests of a canonical prompt.

    `digests[i]` covers the canonical bytes up to `ends[i]`. Two chains that share a digest share
    all bytes before it, so matching is a question of the longest shared digest.
    """

    digests: tuple[bytes, ...]
    ends: tuple[int, ...]

    @property
    def last(self) -> bytes:
        """The digest of the whole prompt."""
        return self.digests[-1]

    @property
    def length_bytes(self) -> int:
        """Length of the prompt in canonical bytes."""
        return self.ends[-1]

    def shared_bytes(self, other: "Chain") -> int:
        """Return how many canonical bytes both prompts are known to begin with."""
        theirs = set(other.digests)
        pairs = zip(reversed(self.digests), reversed(self.ends), strict=True)
        return next((end for digest, end in pairs if digest in theirs), 0)

    def continues(self, other: "Chain") -> bool:
        """Tell whether this prompt begins with the whole of `other`, or is the same."""
        return other.last in self.digests

    def to_proto(self) -> prompt_pb2.Chain:
        """Pack for the wire."""
        return prompt_pb2.Chain(digests=b"".join(self.digests), ends=self.ends)

    @staticmethod
    def from_proto(packed: prompt_pb2.Chain) -> "Chain | None":
        """Unpack, or return None for an empty chain. Raises ValueError for a malformed one."""
        ends = tuple(packed.ends)
        digests = tuple(_split(packed.digests))
        if len(digests) != len(ends) or len(packed.digests) % DIGEST_BYTES:
            raise ValueError(
                f"a chain of {len(ends)} ends needs {len(ends) * DIGEST_BYTES} bytes of digests, "
                f"not {len(packed.digests)}"
            )
        if any(later <= earlier for earlier, later in pairwise(ends)):
            raise ValueError("the ends of a chain must grow")
        return Chain(digests, ends) if ends else None


def _split(digests: bytes) -> Iterator[bytes]:
    for start in range(0, len(digests), DIGEST_BYTES):
        yield digests[start : start + DIGEST_BYTES]
