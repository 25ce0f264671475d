"""Which node each conversation was last on. A hint that grows old, never a promise."""

from dataclasses import dataclass
from urllib.parse import quote

from kvplane_common.chains import Chain
from kvplane_common.keys import SESSION_PREFIX
from kvplane_router.fleet import Node


@dataclass(frozen=True, slots=True)
class Session:
    """The last turn of a conversation."""

    tenant: str
    session_id: str
    model: str
    node_id: str
    epoch: int
    last_digest: bytes
    """The digest of the whole prompt of that turn."""
    last_end: int
    """The canonical byte at which it was taken."""
    tokens: int
    """Prompt and answer. 0 when the engine did not say."""
    expire_ms: int
    """Wall clock, in milliseconds."""

    @property
    def key(self) -> bytes:
        """Its key in the metastore."""
        return session_key(self.tenant, self.session_id)

    def is_on(self, node: Node, chain: Chain) -> bool:
        """Tell whether the prompt goes on with the conversation where `node` has it cached."""
        same_run = (self.node_id, self.epoch) == (node.node_id, node.epoch)
        return same_run and self.last_digest in chain.digests


def session_key(tenant: str, session_id: str) -> bytes:
    """Return the metastore's key of a session; the id is its last part, and may hold any "/"."""
    return SESSION_PREFIX + f"{quote(tenant, safe='')}/{session_id}".encode()


class Sessions:
    """The sessions by their keys, as the watch tells them and as this router has written them."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def keys(self) -> tuple[bytes, ...]:
        """Return the keys of all sessions, as of now."""
        return tuple(self._sessions)

    def put(self, session: Session) -> None:
        """Remember a session, unless a later turn of it is known: writes come back by the watch."""
        known = self._sessions.get(session.key)
        if known is None or known.expire_ms <= session.expire_ms:
            self._sessions[session.key] = session

    def remove(self, key: bytes) -> None:
        """Forget a session. No error if it is not there."""
        self._sessions.pop(key, None)

    def get(self, tenant: str, session_id: str, now_ms: int) -> Session | None:
        """Return a session that has not expired."""
        session = self._sessions.get(session_key(tenant, session_id))
        return session if session and now_ms < session.expire_ms else None

    def expired(self, now_ms: int) -> list[Session]:
        """Return what has expired; it stays until it is forgotten."""
        return [session for session in self._sessions.values() if session.expire_ms <= now_ms]

    def forget(self, session: Session) -> None:
        """Forget a session, unless a later turn of it is known by now."""
        if self._sessions.get(session.key) == session:
            del self._sessions[session.key]
