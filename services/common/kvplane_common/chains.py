"""Chains of running digests, as values: the router builds them, all compare and pack them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvplane.common.v1 import prompt_pb2

DIGEST_BYTES = 8
MAX_DIGESTS = 80_000
"""Most digests of a chain: 16 MiB of prompt at a step of 256 bytes."""


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
        count, size_bytes = len(packed.ends), len(packed.digests)
        if count > MAX_DIGESTS:
            raise ValueError(f"a chain has {count} digests; at most {MAX_DIGESTS} are taken")
        if size_bytes != count * DIGEST_BYTES:
            raise ValueError(
                f"a chain of {count} ends needs {count * DIGEST_BYTES} bytes of digests, "
                f"not {size_bytes}"
            )
        ends = tuple(packed.ends)
        if any(later <= earlier for earlier, later in pairwise((0, *ends))):
            raise ValueError("the ends of a chain must grow, from 1 up")
        return Chain(tuple(_split(packed.digests)), ends) if ends else None


def _split(digests: bytes) -> Iterator[bytes]:
    for start in range(0, len(digests), DIGEST_BYTES):
        yield digests[start : start + DIGEST_BYTES]
