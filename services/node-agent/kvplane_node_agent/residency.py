"""The prompts that are believed to be in the engine's KV cache, and which of them may be forgotten.

A resident prompt is idle or claimed. The running request that continues it claims it: then its
blocks count as that request's, no other request is matched to it, and it is never evicted. Idle
ones hold their own blocks of the pool and go in the order of their last use, oldest first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from kvplane.common.v1 import generation_pb2
from kvplane_common.chains import Chain
from kvplane_node_agent.blocks import BlockPool

Key = tuple[str, bytes]
"""A model, and the last digest of a prompt's chain."""


@dataclass(frozen=True, slots=True)
class Residency:
    """One prompt in the cache. Times are wall-clock milliseconds."""

    model: str
    chain: Chain
    prompt_tokens: int
    """Tokens of the chain's prompt alone."""
    tokens: int
    """Tokens in the cache, the answer included."""
    kv_bytes: int
    """0 when the model's geometry is unknown."""
    blocks: int
    epoch: int
    generation: int
    evidence: "generation_pb2.Evidence.ValueType"
    create_ms: int
    last_use_ms: int
    hits: int = 0

    @property
    def key(self) -> Key:
        """What names it."""
        return self.model, self.chain.last


@dataclass(frozen=True, slots=True)
class Match:
    """The cached prompt that has most in common with a request."""

    residency: Residency
    shared_bytes: int
    whole: bool
    """True when the request begins with the whole of it, or repeats it."""

    @property
    def tokens(self) -> int:
        """Tokens that are expected to be reused."""
        known = self.residency
        tokens = known.prompt_tokens * self.shared_bytes // known.chain.length_bytes
        # The same digest at a later end is a false claim, and shares no more than there is.
        return min(tokens, known.prompt_tokens)


class Journal(Protocol):
    """Hears of every change, to tell others."""

    def put(self, residency: Residency) -> None:
        """Hear that a prompt is cached, or what is known about it now."""
        ...

    def delete(self, residency: Residency) -> None:
        """Hear that a prompt is cached no more."""
        ...


class Residencies:
    """The resident prompts of a node. The pool's `resident` counts the blocks of the idle ones."""

    def __init__(self, pool: BlockPool, journal: Journal, most: int = 4096) -> None:
        """`most` bounds the idle prompts where no blocks do."""
        self._pool = pool
        self._journal = journal
        self._most = most
        self._idle: dict[Key, Residency] = {}
        self._claimed: dict[Key, Residency] = {}
        self._holders: dict[Key, set[Key]] = {}

    def __iter__(self) -> Iterator[Residency]:
        yield from self._claimed.values()
        yield from reversed(self._idle.values())

    def __contains__(self, residency: Residency) -> bool:
        return residency.key in self._idle or residency.key in self._claimed

    @property
    def claimed_count(self) -> int:
        """How many are claimed."""
        return len(self._claimed)

    def match(self, model: str, chain: Chain) -> Match | None:
        """Return the idle prompt that shares most bytes with `chain`; of several, the last used."""
        for digest, end in zip(reversed(chain.digests), reversed(chain.ends), strict=True):
            holders = self._holders.get((model, digest), ())
            idle = [self._idle[key] for key in holders if key in self._idle]
            if idle:
                best = max(idle, key=lambda one: (one.chain.last == digest, one.last_use_ms))
                return Match(best, end, whole=best.chain.last == digest)
        return None

    def claim(self, residency: Residency) -> None:
        """Give an idle prompt, and its blocks, to a running request."""
        del self._idle[residency.key]
        self._claimed[residency.key] = residency
        self._pool.unsettle(residency.blocks)

    def unclaim(self, residency: Residency) -> None:
        """Take a prompt back from its request, as the last used; no-op if it was forgotten."""
        if self._claimed.get(residency.key) is residency:
            del self._claimed[residency.key]
            self._idle[residency.key] = residency
            self._pool.settle(residency.blocks)

    def put(self, residency: Residency) -> None:
        """Remember an idle prompt as the last used, in place of one of the same key.

        Older ones are evicted to make room, and it is not remembered at all if none is left to
        evict; nor while a request has claimed its key.
        """
        if residency.key in self._claimed:
            return
        self._remove(residency)
        if not self._make_room(residency):
            self._journal.delete(residency)
            return
        self._idle[residency.key] = residency
        for digest in residency.chain.digests:
            self._holders.setdefault((residency.model, digest), set()).add(residency.key)
        self._pool.settle(residency.blocks)
        self._journal.put(residency)

    def shrink(self, residency: Residency, tokens: int, kv_bytes: int, now_ms: int) -> None:
        """Cut an idle prompt to the part that `tokens` prove, or forget it if none is left."""
        self.forget(residency)
        proven_bytes = residency.chain.length_bytes * tokens // max(1, residency.prompt_tokens)
        chain = cut(residency.chain, proven_bytes)
        if chain is None or (residency.model, chain.last) in self._idle:
            return
        blocks = self._pool.required(kv_bytes) if residency.blocks else 0
        proven = replace(residency, chain=chain, prompt_tokens=tokens, tokens=tokens, blocks=blocks)
        measured = generation_pb2.EVIDENCE_MEASURED
        self.put(replace(proven, kv_bytes=kv_bytes, evidence=measured, last_use_ms=now_ms))

    def touch(self, residency: Residency, now_ms: int) -> None:
        """Note that a request reused a part of an idle prompt."""
        self.put(replace(residency, last_use_ms=now_ms, hits=residency.hits + 1))

    def forget(self, residency: Residency) -> bool:
        """Forget one idle prompt; tell whether it was there."""
        if residency.key not in self._idle:
            return False
        self._remove(residency)
        self._journal.delete(residency)
        return True

    def evict_oldest(self) -> Residency | None:
        """Forget the idle prompt that was used longest ago, and return it."""
        oldest = next(iter(self._idle.values()), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest

    def fit(self) -> None:
        """Evict until the pool holds no more than it has, or nothing idle is left."""
        while self._pool.over() and self.evict_oldest() is not None:
            pass

    def drop(self, model: str | None = None) -> None:
        """Forget every prompt of a model, or all, claimed ones included: the cache is gone."""
        for residency in [one for one in self if model in (None, one.model)]:
            if not self.forget(residency):
                del self._claimed[residency.key]
                self._unlist(residency)
                self._journal.delete(residency)

    def is_idle(self, residency: Residency) -> bool:
        """Tell whether exactly this is remembered, and idle."""
        return self._idle.get(residency.key) is residency

    def idle(self) -> list[Residency]:
        """Return the idle prompts, oldest first."""
        return list(self._idle.values())

    def _make_room(self, residency: Residency) -> bool:
        while len(self._idle) >= self._most or not self._pool.fits(residency.blocks):
            if self.evict_oldest() is None:
                return False
        return True

    def _remove(self, residency: Residency) -> None:
        known = self._idle.pop(residency.key, None)
        if known is not None:
            self._pool.unsettle(known.blocks)
            self._unlist(known)

    def _unlist(self, residency: Residency) -> None:
        for digest in residency.chain.digests:
            holders = self._holders[residency.model, digest]
            holders.discard(residency.key)
            if not holders:
                del self._holders[residency.model, digest]


def cut(chain: Chain, most_bytes: int) -> Chain | None:
    """Return the beginning of `chain` that ends within `most_bytes`, or None if there is none."""
    kept = sum(1 for end in chain.ends if end <= most_bytes)
    return Chain(chain.digests[:kept], chain.ends[:kept]) if kept else None
