"""Which node holds which prompt: digests, each with the homes where it is cached.

Matching leans on one property of chains. Take a prompt and any cached one: if they share a digest,
they share all bytes before it, and so every digest that the prompt has before it. Along a prompt's
chain the set of homes can therefore only shrink, and a binary search finds where it does:

    digest       0    1    2    3    4    5
    homes       abc  abc  ab   a    a    -        a: up to 4, b: up to 2, c: up to 1

Each search finds the last digest with more homes than were found so far, so a match takes about
log(digests) look-ups for each home, however long the prompt is.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvplane_common.chains import Chain


class Home(NamedTuple):
    """One load of one model on one run of a node: what a cached prompt lives and dies with."""

    node_id: str
    model: str
    epoch: int
    generation: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A prompt that is believed to be cached."""

    key: bytes
    """The key of its record in the metastore."""
    home: Home
    chain: Chain
    tokens: int
    """Tokens in the cache, the answer included. 0 when nobody counted them."""
    last_use_ms: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest beginning of a prompt that a home holds."""

    shared_bytes: int
    whole: bool
    """The home holds all of the prompt."""
    continues: bool
    """The prompt goes on where a cached one ends, instead of branching off within it."""


class PrefixIndex:
    """All cached prompts that are known of, dead ones included until they are dropped."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}
        self._residents: dict[Home, dict[bytes, Entry]] = {}
        self._coldest: dict[Home, Entry] = {}
        self._within = _Homes()
        self._ending = _Homes()

    @property
    def entries(self) -> int:
        """How many prompts it holds."""
        return len(self._entries)

    @property
    def digests(self) -> int:
        """How many different digests it holds; its memory grows with them."""
        return len(self._within)

    def keys(self) -> Iterable[bytes]:
        """Return the keys of all entries, as of now."""
        return tuple(self._entries)

    def get(self, key: bytes) -> Entry | None:
        """Return an entry, or None if it is not there."""
        return self._entries.get(key)

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace the one with the same key."""
        known = self._entries.get(entry.key)
        if known is None or (known.home, known.chain) != (entry.home, entry.chain):
            self.remove(entry.key)
            self._ending.add(entry.home, entry.chain.digests[-1:])
            self._within.add(entry.home, entry.chain.digests)
        self._entries[entry.key] = entry
        self._residents.setdefault(entry.home, {})[entry.key] = entry
        self._coldest.pop(entry.home, None)

    def remove(self, key: bytes) -> None:
        """Forget an entry and all that only it held. No error if it is not there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._ending.remove(entry.home, entry.chain.digests[-1:])
        self._within.remove(entry.home, entry.chain.digests)
        self._coldest.pop(entry.home, None)
        residents = self._residents[entry.home]
        del residents[key]
        if not residents:
            del self._residents[entry.home]

    def drop(self, dead: Callable[[Home], bool]) -> int:
        """Forget the entries of every home that is `dead`, and return how many those were."""
        homes = [home for home in self._residents if dead(home)]
        keys = [key for home in homes for key in self._residents[home]]
        for key in keys:
            self.remove(key)
        return len(keys)

    def match(self, chain: Chain) -> dict[Home, Match]:
        """Return for each home the longest beginning of the prompt that it holds, if any."""
        found: dict[Home, Match] = {}
        position = len(chain.digests)
        while (position := self._last_with_more(chain, position, len(found))) >= 0:
            digest, end = chain.digests[position], chain.ends[position]
            whole = end == chain.length_bytes
            ending = self._ending.of(digest)
            for home in self._within.of(digest):
                if home not in found:
                    found[home] = Match(end, whole, home in ending)
        return found

    def residents(self, home: Home) -> int:
        """Return how many prompts a home holds."""
        return len(self._residents.get(home, ()))

    def coldest(self, home: Home) -> Entry | None:
        """Return the entry of a home that was used longest ago."""
        if home in self._residents and home not in self._coldest:
            residents = self._residents[home].values()
            self._coldest[home] = min(residents, key=lambda entry: entry.last_use_ms)
        return self._coldest.get(home)

    def _last_with_more(self, chain: Chain, below: int, homes: int) -> int:
        """Return the last position before `below` with more than `homes` homes, or -1."""
        return (
            bisect_left(
                chain.digests,
                True,
                hi=below,
                key=lambda digest: len(self._within.of(digest)) <= homes,
            )
            - 1
        )


class _Homes:
    """For each digest the homes that have it, counted: entries of one home overlap."""

    def __init__(self) -> None:
        self._counts: dict[bytes, dict[Home, int]] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, digest: bytes) -> Collection[Home]:
        return self._counts.get(digest, ())

    def add(self, home: Home, digests: Iterable[bytes]) -> None:
        for digest in digests:
            counts = self._counts.setdefault(digest, {})
            counts[home] = counts.get(home, 0) + 1

    def remove(self, home: Home, digests: Iterable[bytes]) -> None:
        for digest in digests:
            counts = self._counts[digest]
            counts[home] -= 1
            if not counts[home]:
                del counts[home]
            if not counts:
                del self._counts[digest]
