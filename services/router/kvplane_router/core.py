"""The router's mind: all that it knows, what it decides by it, and what it learns from the end.

It does no I/O: the shell feeds it the watches and the ends of requests, and does what it decides.
To choose and to reserve is one call without an await, so that no two requests see the same gap.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from kvplane.common.v1 import generation_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane_common.clock import Clock
from kvplane_common.errors import DeadlineUnreachableError, KvplaneError
from kvplane_common.keys import cache_key
from kvplane_router.decide import Decision, Request, Rules, View, decide
from kvplane_router.fleet import Fleet, Node
from kvplane_router.history import History
from kvplane_router.index import Entry, Home, PrefixIndex
from kvplane_router.overtaken import LATE_MS, Overtaken
from kvplane_router.predictions import Predictions
from kvplane_router.refusals import PROBE_MS
from kvplane_router.reservations import Lease, Reservations
from kvplane_router.sessions import Session, Sessions

UNCONFIRMED_MS = 150_000.0
"""How long an own entry stays that its agent's record never confirms. Two to three minutes are best
in replays of public traces. It ends only while the watch of the records is heard: while that is
lost, no record could have come."""
MOST_UNCONFIRMED = 10_000
"""So many stay at most, however long the records are away: the oldest go, and memory is bounded."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """A node, chosen and reserved. Whoever holds it releases `lease`, once."""

    request: Request
    decision: Decision
    node: Node
    predicted_tokens: int
    lease: Lease


class Core:
    """What one router knows and decides."""

    def __init__(self, clock: Clock, rules: Rules, session_ttl_s: float) -> None:
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self.sessions = Sessions()
        self.reservations = Reservations()
        self._overtaken = Overtaken()
        self.history = History()
        self._predictions = Predictions()
        self._clock = clock
        self._rules = rules
        self._session_ttl_ms = int(session_ttl_s * 1000)
        self._rotation = 0
        # By model, when a request was last let through that its deadline spoke against.
        self._probed_ms: dict[str, float] = {}
        # By key, the moment at which an own entry goes unless its agent has confirmed it by then.
        self._unconfirmed: dict[bytes, float] = {}

    def choose(self, request: Request, tried: Mapping[str, KvplaneError]) -> Choice:
        """Choose a node that is not in `tried`, and reserve there what the request will need.

        Raises the refusal, a KvplaneError, when no node can take it.
        """
        now_ms = self._clock.monotonic_ms()
        self.reservations.expire(now_ms)
        decision = self._decide(request, tried, now_ms)
        self._rotation += 1
        self.history.decided(decision)
        chosen = decision.chosen
        if chosen is None:
            raise self._refused(request, decision)
        lease = self.reservations.take(
            chosen.node.node_id,
            request.model,
            chosen.uncached_tokens,
            chosen.blocks.required if chosen.blocks else 0,
        )
        return Choice(request, decision, chosen.node, chosen.cached.tokens, lease)

    def release(self, choice: Choice) -> None:
        """Give back what the request held. Only the first call for a choice does anything."""
        if self.reservations.release(choice.lease):
            self._overtaken.ended(choice.lease, self._clock.monotonic_ms())

    def prefilled(self, choice: Choice) -> None:
        """Note the first piece of the answer: the prompt is no longer pending there."""
        self.reservations.prefilled(choice.lease, self._clock.monotonic_ms())

    def hand_out(self, choice: Choice, reservation_id: str) -> None:
        """Note that the node holds what was chosen, for a caller whose request is not seen here."""
        now_ms = self._clock.monotonic_ms()
        self.reservations.hand_out(choice.lease, reservation_id, now_ms)

    def node_failed(self, choice: Choice, error: KvplaneError) -> None:
        """Note that the call to the node failed, rather than that the node refused it."""
        node_id = choice.node.node_id
        _log.warning("node failed", node_id=node_id, reason=error.reason, why=str(error))
        self.fleet.suspect(node_id, self._clock.monotonic_ms())

    def failed(self, request: Request, error: KvplaneError) -> None:
        """Note the error with which a request ended."""
        self.history.failed(request.request_id, f"{error.reason}: {error}")

    def cancelled(self, request: Request) -> None:
        """Note that the caller went away before the end."""
        self.history.failed(request.request_id, "CANCELLED: the caller went away")

    def finished(self, choice: Choice, completion: generation_pb2.Completion) -> Session | None:
        """Learn from a good end, and release; return the session to store, if there is one."""
        self.release(choice)
        self.history.completed(choice.request.request_id, completion)
        self._compare(choice, completion.usage)
        self._remember(choice, completion.usage)
        return self._turn_ended(choice, completion.usage)

    def sweep(self) -> list[Session]:
        """Forget the leases that have had their time; return the sessions that have."""
        self.reservations.expire(self._clock.monotonic_ms())
        return self.sessions.expired(self._clock.now_ms())

    def nodes_told(self, step: registry_pb2.WatchNodesResponse) -> None:
        """Take in a step of the node watch; what a restart has killed is forgotten."""
        restarted = {
            node.node_id: node.epoch
            for node in step.nodes
            if (known := self.fleet.get(node.node_id)) is None or known.epoch != node.epoch
        }
        gone = self.fleet.apply(step)
        for node in step.nodes:
            now_ms = self._clock.monotonic_ms()
            self._overtaken.reported(node.node_id, self.reservations.newest, now_ms)
            self.reservations.reported(node.node_id, now_ms - LATE_MS)
        for node_id in gone:
            self._overtaken.forget(node_id)
        if restarted or gone:
            self._bury(
                lambda home: home.node_id in gone or home.epoch < restarted.get(home.node_id, 0)
            )

    def entry_told(self, entry: Entry) -> None:
        """Take in a record of a cached prompt, unless a later run of its node is known."""
        node = self.fleet.get(entry.home.node_id)
        self._unconfirmed.pop(entry.key, None)
        if node is not None and entry.home.epoch < node.epoch:
            self.index.remove(entry.key)
        else:
            self.index.put(entry)

    def entry_gone(self, key: bytes) -> None:
        """Take in that a record of a cached prompt was removed."""
        self._unconfirmed.pop(key, None)
        self.index.remove(key)

    def keys_confirmed(self) -> list[bytes]:
        """Return the keys of the entries that have a record, as far as was told."""
        known = self.index.keys()
        return [key for key in known if key not in self._unconfirmed]

    def records_synced(self) -> None:
        """Take in that the watch of the records is up to date, at first or after a loss.

        What its agent could not record meanwhile gets its whole time from now on.
        """
        deadline_ms = self._clock.monotonic_ms() + UNCONFIRMED_MS
        self._unconfirmed = dict.fromkeys(self._unconfirmed, deadline_ms)

    def records_heard(self) -> None:
        """Take in that the watch of the records is alive: what it should have told by now goes."""
        now_ms = self._clock.monotonic_ms()
        # The oldest come first: every one is given the same time.
        while self._unconfirmed and next(iter(self._unconfirmed.values())) <= now_ms:
            self._drop_oldest_unconfirmed()

    def _drop_oldest_unconfirmed(self) -> None:
        key = next(iter(self._unconfirmed))
        del self._unconfirmed[key]
        self.index.remove(key)

    def _bury(self, dead: Callable[[Home], bool]) -> None:
        self.index.drop(dead)
        self._predictions.drop(dead)

    def _decide(
        self, request: Request, tried: Mapping[str, KvplaneError], now_ms: float
    ) -> Decision:
        session = self._session(request)
        view = View(self.fleet, self.index, self.reservations, self._overtaken)

        def decided(asked: Request) -> Decision:
            return decide(view, asked, session, tried, self._rules, self._rotation, now_ms)

        decision = decided(request)
        if not _has_late(decision) or now_ms < self._next_probe_ms(request.model):
            return decision
        self._probed_ms[request.model] = now_ms
        return decided(replace(request, deadline_ms=None))

    def _next_probe_ms(self, model: str) -> float:
        return self._probed_ms.get(model, -math.inf) + PROBE_MS

    def _session(self, request: Request) -> Session | None:
        if not request.session_id:
            return None
        return self.sessions.get(request.tenant, request.session_id, self._clock.now_ms())

    def _refused(self, request: Request, decision: Decision) -> KvplaneError:
        error = decision.refusal
        assert error is not None, "a decision has a choice or a refusal"
        self.failed(request, error)
        return error

    def _home(self, choice: Choice) -> Home | None:
        """Return where the request's prompt is cached now, unless the node restarted since."""
        node = self.fleet.get(choice.node.node_id)
        if node is None or node.epoch != choice.node.epoch:
            return None
        return node.home(choice.request.model)

    def _remember(self, choice: Choice, usage: generation_pb2.Usage) -> None:
        home = self._home(choice)
        if home is None:
            return
        key = cache_key(home.node_id, home.model, choice.request.chain.last)
        now_ms = self._clock.now_ms()
        known = self.index.get(key)
        if known is not None and known.home == home and key not in self._unconfirmed:
            # Its record may have come before this end did, and then no other will.
            self.index.put(replace(known, last_use_ms=now_ms))
            return
        self.index.put(Entry(key, home, choice.request.chain, _counted(usage), now_ms))
        self._unconfirmed.pop(key, None)
        self._unconfirmed[key] = self._clock.monotonic_ms() + UNCONFIRMED_MS
        if len(self._unconfirmed) > MOST_UNCONFIRMED:
            self._drop_oldest_unconfirmed()

    def _compare(self, choice: Choice, usage: generation_pb2.Usage) -> None:
        home = self._home(choice)
        measured = usage.evidence == generation_pb2.EVIDENCE_MEASURED
        if home is None or not measured or not usage.HasField("cached_tokens"):
            return
        if self._predictions.collapsed(home, choice.predicted_tokens, usage.cached_tokens):
            dropped = self.index.drop(lambda other: other == home)
            _log.warning(
                "predictions collapsed: a node's entries for a model are dropped",
                node_id=home.node_id,
                model=home.model,
                entries=dropped,
            )

    def _turn_ended(self, choice: Choice, usage: generation_pb2.Usage) -> Session | None:
        request = choice.request
        if not request.session_id:
            return None
        session = Session(
            tenant=request.tenant,
            session_id=request.session_id,
            model=request.model,
            node_id=choice.node.node_id,
            epoch=choice.node.epoch,
            last_digest=request.chain.last,
            last_end=request.chain.length_bytes,
            tokens=_counted(usage),
            expire_ms=self._clock.now_ms() + self._session_ttl_ms,
        )
        self.sessions.put(session)
        return session


def _counted(usage: generation_pb2.Usage) -> int:
    """Return the tokens of prompt and answer, or 0 where the engine did not count both."""
    if not (usage.HasField("prompt_tokens") and usage.HasField("completion_tokens")):
        return 0
    return usage.prompt_tokens + usage.completion_tokens


def _has_late(decision: Decision) -> bool:
    """Tell whether nothing was chosen, and a node is out of the question for the deadline alone."""
    return decision.chosen is None and any(
        isinstance(one.excluded, DeadlineUnreachableError) for one in decision.candidates
    )
