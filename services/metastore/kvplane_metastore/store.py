"""What the store holds, in memory and pure: ordered keys, revisions, and the last changes.

A write takes two steps, because between them the disk is asked: a `Draft` says what a group of
batches would do, one after the other; `Store.apply` does it.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvplane.metastore.v1 import metastore_pb2
from kvplane_metastore.ordered import OrderedMap

HISTORY_CHANGES = 100_000
"""Most revisions that are remembered for watchers."""
HISTORY_BYTES = 64 * 1024 * 1024
"""Most bytes of keys and values that are remembered for watchers."""


class KeyRange(NamedTuple):
    """Keys from `key` up to but without `end`; with an empty `end`, `key` alone."""

    key: bytes
    end: bytes

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, bytes):
            return False
        return self.key <= key < self.end if self.end else key == self.key


class Entry(NamedTuple):
    """A key's value and the revision of its last write."""

    value: bytes
    mod_revision: int


class Event(NamedTuple):
    """What became of a key. A value of None: it was removed."""

    key: bytes
    value: bytes | None


class Change(NamedTuple):
    """What one revision did: at most one event a key, in the order of their last changes."""

    revision: int
    events: tuple[Event, ...]

    def size_bytes(self) -> int:
        """Return the bytes of the keys and values."""
        return sum(len(event.key) + len(event.value or b"") for event in self.events)


class Store:
    """The keys as of `revision`, and the changes that led there, as far back as they fit.

    Invariant: the revisions of the history are consecutive and end with `revision`.
    """

    def __init__(
        self, history_changes: int = HISTORY_CHANGES, history_bytes: int = HISTORY_BYTES
    ) -> None:
        self.revision = 0
        self._entries: OrderedMap[Entry] = OrderedMap()
        self._history: deque[Change] = deque()
        self._history_bytes = 0
        self._most_changes = history_changes
        self._most_bytes = history_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of `key`, or None."""
        return self._entries.get(key)

    def between(self, keys: KeyRange) -> Iterator[tuple[bytes, Entry]]:
        """Yield the entries of a range in order. The store must not change meanwhile."""
        return self._entries.between(*keys)

    def remembers(self, revision: int) -> bool:
        """Tell whether every change after `revision` is still known."""
        return self.revision - len(self._history) <= revision <= self.revision

    def change_after(self, revision: int) -> Change | None:
        """Return the first change after `revision`; None if there is none, or it is forgotten."""
        back = revision - self.revision
        return self._history[back] if -len(self._history) <= back < 0 else None

    def apply(self, changes: Iterable[Change]) -> None:
        """Make a draft's changes true and remember them, forgetting old ones beyond the bounds."""
        for change in changes:
            for event in change.events:
                if event.value is None:
                    self._entries.discard(event.key)
                else:
                    self._entries[event.key] = Entry(event.value, change.revision)
            self.revision = change.revision
            self._remember(change)

    def _remember(self, change: Change) -> None:
        self._history.append(change)
        self._history_bytes += change.size_bytes()
        while len(self._history) > self._most_changes or self._history_bytes > self._most_bytes:
            self._history_bytes -= self._history.popleft().size_bytes()


class Draft:
    """A group of batches on top of a store that does not change meanwhile.

    Each batch sees what those before it did. Nothing is done until the store applies `changes`.
    """

    def __init__(self, store: Store) -> None:
        self.changes: list[Change] = []
        self._store = store
        # None stands for a key that a batch of this draft removed.
        self._overlay: OrderedMap[Entry | None] = OrderedMap()

    @property
    def revision(self) -> int:
        """The revision of the last batch."""
        return self._store.revision + len(self.changes)

    def failed_condition(
        self, conditions: Iterable[metastore_pb2.Condition]
    ) -> metastore_pb2.Condition | None:
        """Return the first condition that does not hold, or None."""
        return next((one for one in conditions if not _holds(one, self.get(one.key))), None)

    def add(self, operations: Iterable[metastore_pb2.Operation]) -> int:
        """Put a batch on top, and return the revision it takes."""
        revision = self.revision + 1
        events: dict[bytes, Event] = {}
        for operation in operations:
            for event in self._events(operation):
                # Taken out first, so that the last change of a key also stands last.
                events.pop(event.key, None)
                events[event.key] = event
                kept = None if event.value is None else Entry(event.value, revision)
                self._overlay[event.key] = kept
        self.changes.append(Change(revision, tuple(events.values())))
        return revision

    def _events(self, operation: metastore_pb2.Operation) -> list[Event]:
        if operation.WhichOneof("kind") == "put":
            return [Event(operation.put.key, operation.put.value)]
        keys = KeyRange(operation.delete.key, operation.delete.range_end)
        below = (key for key, _ in self._store.between(keys) if key not in self._overlay)
        above = (key for key, entry in self._overlay.between(*keys) if entry is not None)
        return [Event(key, None) for key in sorted((*below, *above))]

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of `key` as the batches so far leave it, or None."""
        return self._overlay.get(key) if key in self._overlay else self._store.get(key)


def _holds(condition: metastore_pb2.Condition, entry: Entry | None) -> bool:
    if condition.WhichOneof("expectation") == "value":
        return entry is not None and entry.value == condition.value
    return condition.mod_revision == (entry.mod_revision if entry else 0)
