"""The node at work: its books, its engine, and those who wait for them."""

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import structlog

from kvplane.agent.v1 import agent_pb2
from kvplane.common.v1 import generation_pb2, node_pb2
from kvplane_common.clock import Clock
from kvplane_common.errors import InvalidRequestError, KvplaneError
from kvplane_node_agent.admission import Lease
from kvplane_node_agent.demand import Demand
from kvplane_node_agent.engines.base import Engine, EngineModel, Finished
from kvplane_node_agent.ledger import Ledger
from kvplane_node_agent.memory import Memory
from kvplane_node_agent.patience import Patience
from kvplane_node_agent.records import Records
from kvplane_node_agent.report import admission_of, capacity_of, load_of
from kvplane_node_agent.reservations import (
    DEFAULT_HOLD_MS,
    MOST_HOLD_MS,
    Reservation,
    Reservations,
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Held:
    """A lease, and how long its request waited for it."""

    lease: Lease
    queue_ms: float

    def to_proto(self) -> agent_pb2.Admission:
        """Pack for the wire."""
        return admission_of(self.lease, self.queue_ms)


class Node:
    """What the RPCs, the engine's watch and the registration share.

    `changed` is set whenever load or capacity may have changed, `engine_changed` when the engine
    came or went, and `look_now` when a request saw it fail, or load a model.
    """

    def __init__(self, ledger: Ledger, records: Records, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self.engine: Engine | None = None
        self.changed = asyncio.Event()
        self.engine_changed = asyncio.Event()
        self.look_now = asyncio.Event()
        self.patience = Patience()
        self._records = records
        self._engine_name = ""
        self._memory = Memory()
        self._reservations = Reservations()
        self._reserved = asyncio.Event()

    @property
    def ready(self) -> bool:
        """True while the node can serve."""
        return self.ledger.engine_present and not self.ledger.stopping

    def capacity(self) -> node_pb2.Capacity:
        """Return what the node has now."""
        return capacity_of(self.ledger, self._engine_name, self._memory)

    def load(self) -> node_pb2.Load:
        """Return what the node is doing now."""
        return load_of(self.ledger)

    async def admit(self, demand: Demand) -> Held:
        """Wait for a slot and blocks. Raises the refusals of Ledger.submit.

        A caller that is cancelled meanwhile leaves nothing behind.
        """
        decided = asyncio.Event()
        begun_ms = self.clock.monotonic_ms()
        ticket = self.ledger.submit(demand, decided.set)
        self.changed.set()
        try:
            if ticket.lease is None:
                await decided.wait()
        except asyncio.CancelledError:
            self.ledger.withdraw(ticket)
            self.changed.set()
            raise
        if ticket.lease is None:
            assert ticket.refusal is not None
            raise ticket.refusal
        return Held(ticket.lease, self.clock.monotonic_ms() - begun_ms)

    async def reserve(self, request_id: str, demand: Demand, hold_ms: int) -> Reservation:
        """Hold a slot and blocks for a request to come; the same one for the same `request_id`.

        Raises the refusals of `admit`, and InvalidRequestError where that request holds a
        reservation for another model.
        """
        self._expire()
        if known := self._reservations.of_request(request_id, demand.model):
            return known
        held = await self.admit(demand)
        try:
            known = self._reservations.of_request(request_id, demand.model)
        except InvalidRequestError:
            self.give_back(held.lease)
            raise
        if known:
            self.give_back(held.lease)
            return known
        hold_ms = min(hold_ms or DEFAULT_HOLD_MS, MOST_HOLD_MS)
        reservation = Reservation(
            reservation_id=uuid.uuid4().hex,
            request_id=request_id,
            lease=held.lease,
            queue_ms=held.queue_ms,
            expire_ms=self.clock.monotonic_ms() + hold_ms,
            expire_wall_ms=self.clock.now_ms() + hold_ms,
        )
        self._reservations.add(reservation)
        self._reserved.set()
        return reservation

    async def use(self, reservation_id: str, demand: Demand) -> Held:
        """Use a reservation up. Raises ReservationUnknownError.

        A request that needs more than was reserved gives it back and is admitted like any other,
        with the refusals of `admit`.
        """
        self._expire()
        reservation = self._reservations.take(reservation_id, demand.model)
        lease = reservation.lease
        demand = replace(demand, chain=demand.chain or lease.demand.chain)
        try:
            enough = self.ledger.adopt(lease, demand)
        except KvplaneError:
            self.give_back(lease)
            raise
        if enough:
            self.changed.set()
            return Held(lease, reservation.queue_ms)
        self.give_back(lease)
        return await self.admit(demand)

    def release(self, reservation_id: str) -> None:
        """Give a reservation up, if it is held."""
        reservation = self._reservations.give_back(reservation_id)
        if reservation is not None:
            self.give_back(reservation.lease)

    def give_back(self, lease: Lease) -> None:
        """Give back a lease whose request did not end well."""
        self.ledger.abandon(lease)
        self.changed.set()

    @contextmanager
    def using(self, lease: Lease) -> Iterator[None]:
        """Give `lease` back at the end of the block, unless it ended well before."""
        try:
            yield
        finally:
            if not lease.released:
                self.give_back(lease)

    def answering(self, lease: Lease) -> None:
        """Note that a request's prompt is evaluated: its answer has begun."""
        lease.pending_prefill_tokens = 0
        self.changed.set()

    def finish(
        self, lease: Lease, finished: Finished, epoch: int, service_ms: float
    ) -> generation_pb2.Usage:
        """Give back a lease whose request ended well, and learn from it. See Ledger.finish."""
        usage = self.ledger.finish(lease, finished, epoch, self.clock.now_ms(), service_ms)
        if not self.ledger.is_loaded(lease.demand.model):
            self.look_now.set()
        self.changed.set()
        return usage

    def evict(self, model: str, digest: bytes) -> int:
        """Forget idle prompts, of one model and of one digest unless empty; return how many."""
        evicted = self.ledger.evict(model, digest)
        self.changed.set()
        return evicted

    async def expire_reservations(self) -> None:
        """Give up reservations as they expire, until cancelled."""
        while True:
            self._reserved.clear()
            next_ms = self._reservations.next_expire_ms()
            now_ms = self.clock.monotonic_ms()
            wait_s = None if next_ms is None else max(0.0, next_ms - now_ms) / 1000
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._reserved.wait()
            self._expire()

    def engine_seen(self, name: str, models: Sequence[EngineModel], memory: Memory) -> None:
        """Take what the engine is and serves now."""
        came, epoch = not self.ledger.engine_present, self.ledger.epoch
        self._engine_name, self._memory = name, memory
        self.ledger.engine_seen(models, memory.free_bytes, self.clock.now_ms())
        if self.ledger.epoch != epoch:
            self._records.clear()
        if came:
            _log.info("engine is there", engine=name, epoch=self.ledger.epoch)
            self.patience.regain()
            self.engine_changed.set()
        self.changed.set()

    def engine_lost(self, why: str) -> None:
        """Note that the engine is gone."""
        _log.warning("engine is gone", engine=self._engine_name, why=why)
        self.ledger.engine_lost()
        self.patience.lose()
        self.engine_changed.set()
        self.changed.set()

    def granted(self, epoch: int) -> None:
        """Note that the registry knows this agent as the node's, in `epoch`."""
        self._records.grant(epoch, self.ledger.residencies)

    def displaced(self) -> None:
        """Note that the registry knows another agent as the node's."""
        self._records.revoke()

    def stale(self, known_epoch: int) -> None:
        """Begin an epoch later than one that the registry knows of, perhaps of another agent."""
        self.displaced()
        self.ledger.new_epoch(max(self.clock.now_ms(), known_epoch + 1))
        self.changed.set()

    def set_draining(self, draining: bool) -> None:
        """Stop admitting, or begin again."""
        if draining != self.ledger.draining:
            _log.info("draining" if draining else "admitting")
            self.ledger.set_draining(draining)
            self.changed.set()

    def stop(self) -> None:
        """Stop admitting for good, and give up what is reserved; running work goes on."""
        self.ledger.stop()
        for reservation in self._reservations.all():
            self.release(reservation.reservation_id)
        self.engine_changed.set()
        self.changed.set()

    def _expire(self) -> None:
        for reservation in self._reservations.expired(self.clock.monotonic_ms()):
            self.give_back(reservation.lease)
