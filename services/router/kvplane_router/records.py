"""The metastore's records as plain data, and back."""

from kvplane.common.v1 import records_pb2
from kvplane_common.chains import Chain
from kvplane_router.index import Entry, Home
from kvplane_router.sessions import Session


def entry_from(key: bytes, value: bytes) -> Entry | None:
    """Return a cached prompt, or None for one without a chain: it can match nothing.

    Raises ValueError or google.protobuf.message.DecodeError for a malformed record.
    """
    record = records_pb2.Residency.FromString(value)
    chain = Chain.from_proto(record.chain)
    if chain is None:
        return None
    home = Home(record.node_id, record.model, record.epoch, record.generation)
    return Entry(key, home, chain, record.tokens, record.last_use_time.ToMilliseconds())


def session_from(value: bytes) -> Session:
    """Return a session. Raises google.protobuf.message.DecodeError for a malformed record."""
    record = records_pb2.Session.FromString(value)
    return Session(
        tenant=record.tenant,
        session_id=record.session_id,
        model=record.model,
        node_id=record.node_id,
        epoch=record.epoch,
        last_digest=record.last_digest,
        last_end=record.last_end,
        tokens=record.tokens,
        expire_ms=record.expire_time.ToMilliseconds(),
    )


def session_record(session: Session) -> bytes:
    """Return the value to store for a session."""
    record = records_pb2.Session(
        tenant=session.tenant,
        session_id=session.session_id,
        model=session.model,
        node_id=session.node_id,
        epoch=session.epoch,
        last_digest=session.last_digest,
        last_end=session.last_end,
        tokens=session.tokens,
    )
    record.expire_time.FromMilliseconds(session.expire_ms)
    return record.SerializeToString()
