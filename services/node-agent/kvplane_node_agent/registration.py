"""Keeps the node known to the registry; while that is away the node serves on."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress

import grpc
import structlog

from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2, registry_pb2_grpc
from kvplane_common.background import pauses_s
from kvplane_common.errors import (
    KvplaneError,
    NodeIdTakenError,
    StaleEpochError,
    UnavailableError,
    from_rpc,
)
from kvplane_node_agent.node import Node

_CALL_S = 5.0
_GOODBYE_S = 2.0
_LEAST_GAP_S = 0.2
"""Shortest time between heartbeats, however often the load changes."""
_MOST_GAP_S = 1.0
"""Longest, however long the lease: the answer to one brings the operator's wish to drain."""

_log = structlog.get_logger(__name__)


class Registration:
    """Registers the node, and renews its lease with what it has and does, until its goodbye."""

    def __init__(self, node: Node, channel: grpc.aio.Channel, labels: Mapping[str, str]) -> None:
        self._node = node
        self._stub = registry_pb2_grpc.RegistryServiceStub(channel)
        self._address = ""
        self._labels = dict(labels)
        self._wish = False
        self._granted_epoch: int | None = None

    async def run(self, address: str) -> None:
        """Register the node at `address`, send heartbeats, and begin again whenever that ends.

        Ends only when cancelled.
        """
        self._address = address
        pauses, away = pauses_s(), False
        while True:
            try:
                epoch = self._node.ledger.epoch
                lease_s = await self._register(epoch)
                self._granted_epoch = epoch
                self._node.granted(epoch)
                _log.info("registered", epoch=epoch, lease_s=lease_s)
                pauses, away = pauses_s(), False
                await self._send_heartbeats(epoch, min(lease_s / 3, _MOST_GAP_S))
            except StaleEpochError as error:
                known_epoch = int(error.facts.get("known_epoch", "0"))
                _log.warning("epoch is stale", epoch=epoch, known_epoch=known_epoch)
                self._node.stale(known_epoch)
                await asyncio.sleep(next(pauses))
            except KvplaneError as error:
                if isinstance(error, NodeIdTakenError):
                    self._granted_epoch = None
                    self._node.displaced()
                if not away:
                    _log.warning("not registered", reason=error.reason, why=str(error))
                away = True
                await asyncio.sleep(next(pauses))

    async def say_goodbye(self) -> None:
        """Tell the registry that the node stops, once `run` was cancelled; a failure is logged."""
        if self._granted_epoch is None:
            return
        request = registry_pb2.DeregisterRequest(
            node_id=self._node.ledger.node_id, epoch=self._granted_epoch
        )
        try:
            await self._stub.Deregister(request, timeout=_GOODBYE_S)
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error)
            _log.warning("not deregistered", reason=error.reason, why=str(error))

    async def _register(self, epoch: int) -> float:
        node = node_pb2.Node(
            node_id=self._node.ledger.node_id,
            address=self._address,
            labels=self._labels,
            epoch=epoch,
            capacity=self._node.capacity(),
            load=self._node.load(),
        )
        try:
            reply = await self._stub.Register(
                registry_pb2.RegisterRequest(node=node), timeout=_CALL_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        self._heed(reply.node.draining)
        return reply.lease_duration.ToMilliseconds() / 1000

    async def _send_heartbeats(self, epoch: int, period_s: float) -> None:
        call = self._stub.Heartbeat(self._beats(epoch, period_s))
        try:
            async for reply in call:
                self._heed(reply.draining)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        finally:
            call.cancel()
        if self._node.ledger.epoch == epoch:
            raise UnavailableError("the registry ended the heartbeats")

    async def _beats(
        self, epoch: int, period_s: float
    ) -> AsyncGenerator[registry_pb2.HeartbeatRequest, None]:
        node, told = self._node, None
        gap_s = min(_LEAST_GAP_S, period_s)
        while node.ledger.epoch == epoch:
            node.changed.clear()
            capacity = node.capacity()
            yield registry_pb2.HeartbeatRequest(
                node_id=node.ledger.node_id,
                epoch=epoch,
                capacity=None if capacity == told else capacity,
                load=node.load(),
            )
            told = capacity
            await asyncio.sleep(gap_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(period_s - gap_s):
                    await node.changed.wait()

    def _heed(self, draining: bool) -> None:
        # Only a change of the registry's mind overrules what was asked of the agent itself.
        if draining != self._wish:
            self._wish = draining
            self._node.set_draining(draining)
