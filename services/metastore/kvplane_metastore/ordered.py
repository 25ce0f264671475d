"""A map whose keys are in the order of their bytes."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from sortedcontainers import SortedDict

Value = TypeVar("Value")


class OrderedMap(Generic[Value]):
    """Keys and values; finding, adding and removing take logarithmic time."""

    def __init__(self) -> None:
        self._values = SortedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: bytes) -> bool:
        return key in self._values

    def __setitem__(self, key: bytes, value: Value) -> None:
        self._values[key] = value

    def get(self, key: bytes) -> Value | None:
        """Return the value of `key`, or None."""
        value: Value | None = self._values.get(key)
        return value

    def discard(self, key: bytes) -> None:
        """Remove `key` if it is there."""
        self._values.pop(key, None)

    def between(self, key: bytes, end: bytes) -> Iterator[tuple[bytes, Value]]:
        """Yield what lies from `key` up to but without `end`; with an empty `end`, `key` alone.

        The map must not change meanwhile.
        """
        if not end:
            if key in self._values:
                yield key, self._values[key]
            return
        for found in self._values.irange(key, end, inclusive=(True, False)):
            yield found, self._values[found]
