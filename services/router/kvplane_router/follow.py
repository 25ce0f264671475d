"""Keeps the router's view up to date: the watches that feed it, and what has had its time."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.errors import ConditionFailedError, KvplaneError
from kvplane_common.keys import CACHE_PREFIX, SESSION_PREFIX
from kvplane_common.metastore import MetastoreClient, delete
from kvplane_common.nodes import follow_nodes
from kvplane_router.agents import Agents
from kvplane_router.core import Core
from kvplane_router.records import entry_from, session_from, session_record
from kvplane_router.sessions import Session, Sessions

_SWEEP_S = 10.0

_log = structlog.get_logger(__name__)
_Step = metastore_pb2.WatchResponse


class Followed:
    """What must have been seen once before the view can be trusted."""

    def __init__(self) -> None:
        self.cache = asyncio.Event()
        self.sessions = asyncio.Event()
        self.nodes = asyncio.Event()

    async def wait(self) -> None:
        """Return when all of it was."""
        for seen in (self.cache, self.sessions, self.nodes):
            await seen.wait()


async def follow_cache(client: MetastoreClient, core: Core, synced: asyncio.Event) -> None:
    """Keep the index as the agents' records say, and what they cannot have told yet."""

    def put(key: bytes, value: bytes) -> None:
        entry = entry_from(key, value)
        if entry is not None:
            core.entry_told(entry)

    def seen(step: _Step) -> None:
        if step.kind == _Step.KIND_SYNCED:
            core.records_synced()
            synced.set()
        elif step.kind == _Step.KIND_CHANGES:
            core.records_heard()

    await _follow(client, CACHE_PREFIX, core.keys_confirmed, put, core.entry_gone, seen)


async def follow_sessions(client: MetastoreClient, core: Core, synced: asyncio.Event) -> None:
    """Keep the sessions as the routers' records say."""

    def put(key: bytes, value: bytes) -> None:
        session = session_from(value)
        if session.key == key:
            core.sessions.put(session)

    def seen(step: _Step) -> None:
        if step.kind == _Step.KIND_SYNCED:
            synced.set()

    sessions = core.sessions
    await _follow(client, SESSION_PREFIX, sessions.keys, put, sessions.remove, seen)


async def follow_fleet(
    channel: grpc.aio.Channel, core: Core, agents: Agents, seen: asyncio.Event
) -> None:
    """Keep the nodes as the registry says."""
    async with aclosing(follow_nodes(channel)) as steps:
        async for step in steps:
            core.nodes_told(step)
            seen.set()
            await agents.keep(core.fleet.addresses())


async def sweep(core: Core, client: MetastoreClient) -> None:
    """Forget now and then what has had its time."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        await delete_sessions(client, core.sessions, core.sweep())


async def delete_sessions(
    client: MetastoreClient, sessions: Sessions, expired: Iterable[Session]
) -> None:
    """Delete the records of expired sessions, and forget these.

    A record that says something else stays: another router renewed it, and the watch will tell.
    With the metastore away the rest stays for the next time.
    """
    for session in expired:
        unchanged = metastore_pb2.Condition(key=session.key, value=session_record(session))
        try:
            await client.write([delete(session.key)], [unchanged])
        except ConditionFailedError:
            _log.debug("a session was renewed elsewhere, or is gone")
        except KvplaneError as error:
            _log.info("expired sessions were not deleted", why=str(error))
            return
        sessions.forget(session)


async def _follow(
    client: MetastoreClient,
    prefix: bytes,
    keys: Callable[[], Iterable[bytes]],
    put: Callable[[bytes, bytes], None],
    remove: Callable[[bytes], None],
    seen: Callable[[_Step], None],
) -> None:
    # A new snapshot replaces what is known only where it differs: nothing goes cold meanwhile.
    unseen: set[bytes] = set()
    async with aclosing(client.follow(prefix)) as steps:
        async for step in steps:
            if step.kind == _Step.KIND_RESET:
                unseen = set(keys())
            for event in step.events:
                unseen.discard(event.key)
                _apply(event, put, remove)
            if step.kind == _Step.KIND_SYNCED:
                for key in unseen:
                    remove(key)
                unseen.clear()
            seen(step)


def _apply(
    event: metastore_pb2.Event,
    put: Callable[[bytes, bytes], None],
    remove: Callable[[bytes], None],
) -> None:
    if not event.HasField("value"):
        remove(event.key)
        return
    try:
        put(event.key, event.value)
    except (ValueError, DecodeError) as error:
        _log.warning("unreadable record", key=event.key.decode(errors="replace"), why=str(error))
