"""Joins the leases with the metastore that remembers them and the watchers that follow them.

What an operator or a new agent asks for is written first and takes effect then. What keeps a fleet
in service (heartbeats, the expiry of leases, an agent's return under its known epoch) takes effect
at once and is written when the metastore is there.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import structlog
from google.protobuf.message import DecodeError

from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane_common.background import pauses_s
from kvplane_common.errors import InvalidRequestError, KvplaneError, MetastoreUnavailableError
from kvplane_common.keys import NODE_PREFIX
from kvplane_common.metastore import MetastoreClient
from kvplane_registry.feed import Feed
from kvplane_registry.leases import Leases
from kvplane_registry.records import operations, parse, same_record

Node = node_pb2.Node

_CHECKS_PER_LEASE = 10

_log = structlog.get_logger(__name__)


class Registry:
    """The nodes of a fleet.

    Until `load` has returned, every other call raises MetastoreUnavailableError.
    """

    def __init__(self, leases: Leases, lease_s: float, metastore: MetastoreClient) -> None:
        self.lease_s = lease_s
        self.feed = Feed()
        self._leases = leases
        self._metastore = metastore
        self._loaded = False
        # One change of a node at a time, so that its record and its memory agree in the end.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._unsaved: set[str] = set()
        self._wake_saver = asyncio.Event()

    async def load(self) -> None:
        """Read the nodes from the metastore, waiting for it as long as it takes."""
        pauses, told = pauses_s(), False
        while not self._loaded:
            try:
                kvs, _ = await self._metastore.range(NODE_PREFIX)
            except KvplaneError as error:
                if not told:
                    _log.warning("waiting for the metastore", why=str(error))
                told = True
                await asyncio.sleep(next(pauses))
            else:
                self._restore([kv.value for kv in kvs])

    async def register(self, asked: Node) -> Node:
        """Let a node in, as Leases.admit allows.

        Raises MetastoreUnavailableError if its record would be new and cannot be written.
        """
        self._check_loaded()
        if same_record(self._leases.find(asked.node_id), asked):
            return self._return(asked)
        async with self._turn(asked.node_id):
            node = self._leases.admit(asked)
            await self._save(asked.node_id, node)
            # Nothing but this turn can have made the node's id, address or epoch another.
            node = self._publish(self._leases.register(node))
        _log.info("registered", node_id=node.node_id, address=node.address, epoch=node.epoch)
        return node

    def renew(self, beat: registry_pb2.HeartbeatRequest) -> Node:
        """Renew a lease and return the node. Raises as Leases.renew."""
        self._check_loaded()
        capacity = beat.capacity if beat.HasField("capacity") else None
        load = beat.load if beat.HasField("load") else None
        changed = self._leases.renew(beat.node_id, beat.epoch, capacity, load)
        node = self._leases.get(beat.node_id)
        return self._publish(node) if changed else node

    async def drain(self, node_id: str, draining: bool) -> Node:
        """Keep new work away from a node, or let it come again."""
        self._check_loaded()
        async with self._turn(node_id):
            node = self._leases.get(node_id)
            if node.draining == draining:
                return node
            node.draining = draining
            await self._save(node_id, node)
            node = self._publish(self._leases.set_draining(node_id, draining))
        _log.info("drain changed", node_id=node_id, draining=draining)
        return node

    async def deregister(self, node_id: str, epoch: int) -> None:
        """Forget a node; but one that says goodbye itself, with its epoch, stays known, as lost."""
        self._check_loaded()
        async with self._turn(node_id):
            node = self._leases.find(node_id)
            self._leases.check_goodbye(node_id, epoch)
            if node is None:
                return
            if epoch:
                node.state = Node.STATE_LOST
                await self._save(node_id, node)
                self._publish(self._leases.lose(node_id))
            else:
                await self._save(node_id, None)
                self._leases.forget(node_id)
                self.feed.publish(node_id, None)
        _log.info("deregistered", node_id=node_id, remembered=bool(epoch))

    def nodes(self) -> list[Node]:
        """Return every node, by node id."""
        self._check_loaded()
        return self._leases.nodes()

    def watch(self) -> AsyncGenerator[registry_pb2.WatchNodesResponse, None]:
        """Return a new watch of the nodes."""
        self._check_loaded()
        return self.feed.follow(self._leases.nodes)

    async def expire(self) -> None:
        """Take nodes whose lease ends out of service, until cancelled."""
        while True:
            await asyncio.sleep(self.lease_s / _CHECKS_PER_LEASE)
            for node in self._leases.expire():
                _log.warning("lost a node", node_id=node.node_id, epoch=node.epoch)
                self._publish(node)
                self._save_later(node.node_id)

    async def save(self) -> None:
        """Bring the records of nodes up to date that could not wait for it, until cancelled."""
        pauses, away = pauses_s(), False
        while True:
            await self._wake_saver.wait()
            self._wake_saver.clear()
            try:
                await self._save_unsaved()
            except KvplaneError as error:
                if not away:
                    _log.warning("records wait for the metastore", why=str(error))
                away = True
                await asyncio.sleep(next(pauses))
            else:
                pauses, away = pauses_s(), False

    def _restore(self, values: list[bytes]) -> None:
        nodes = []
        for value in values:
            try:
                nodes.append(parse(value))
            except DecodeError as error:
                _log.error("skipped a broken record", why=str(error))
        self._leases.restore(nodes)
        self._loaded = True
        _log.info("read the nodes", count=len(nodes))

    def _return(self, asked: Node) -> Node:
        before = self._leases.get(asked.node_id)
        node = self._publish(self._leases.register(self._leases.admit(asked)))
        if before.state != Node.STATE_READY:
            self._save_later(node.node_id)
            _log.info("a node is back", node_id=node.node_id, epoch=node.epoch)
        return node

    def _publish(self, node: Node) -> Node:
        self.feed.publish(node.node_id, node)
        return node

    def _check_loaded(self) -> None:
        if not self._loaded:
            raise MetastoreUnavailableError(
                "the registry has not read its nodes from the metastore yet; try again",
                retry_after_ms=500,
            )

    @asynccontextmanager
    async def _turn(self, node_id: str) -> AsyncIterator[None]:
        lock = self._turns.setdefault(node_id, asyncio.Lock())
        async with lock:
            yield

    async def _save(self, node_id: str, node: Node | None) -> None:
        try:
            await self._metastore.write(operations(node_id, node))
        except BaseException:
            # It may have been written all the same: memory, which stays as it was, has to win.
            self._save_later(node_id)
            raise

    def _save_later(self, node_id: str) -> None:
        self._unsaved.add(node_id)
        self._wake_saver.set()

    async def _save_unsaved(self) -> None:
        while self._unsaved:
            node_id = next(iter(self._unsaved))
            async with self._turn(node_id):
                self._unsaved.discard(node_id)
                await self._save_memory(node_id)

    async def _save_memory(self, node_id: str) -> None:
        try:
            await self._save(node_id, self._leases.find(node_id))
        except InvalidRequestError as error:
            # Trying again would help neither this record nor those behind it.
            self._unsaved.discard(node_id)
            _log.error("the metastore refused a record", node_id=node_id, why=str(error))
