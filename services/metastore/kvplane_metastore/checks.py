"""What a request must be like, said to the caller where it is not."""

from collections.abc import Sequence

from kvplane.metastore.v1 import metastore_pb2
from kvplane_common.errors import InvalidRequestError
from kvplane_common.metastore import MAX_KEY_BYTES, MAX_OPERATIONS, MAX_VALUE_BYTES
from kvplane_metastore.store import KeyRange


def checked_range(key: bytes, range_end: bytes) -> KeyRange:
    """Return the range. Raises InvalidRequestError for an empty key, or an end before it."""
    if not key:
        raise InvalidRequestError("the key of a range is empty; every range begins with a key")
    if range_end and range_end < key:
        raise InvalidRequestError(
            f"the range ends at {range_end!r}, before it begins at {key!r}; swap the two, or "
            "leave the end empty for a single key"
        )
    return KeyRange(key, range_end)


def check_batch(
    operations: Sequence[metastore_pb2.Operation], conditions: Sequence[metastore_pb2.Condition]
) -> None:
    """Raise InvalidRequestError for a batch that no state of the store would accept."""
    _within("operations of the batch", len(operations), 1, MAX_OPERATIONS)
    for operation in operations:
        kind = operation.WhichOneof("kind")
        if kind is None:
            raise InvalidRequestError("an operation is neither a put nor a delete")
        if kind == "put":
            _within("bytes of a put's key", len(operation.put.key), 1, MAX_KEY_BYTES)
            _within("bytes of a value", len(operation.put.value), 0, MAX_VALUE_BYTES)
        else:
            checked_range(operation.delete.key, operation.delete.range_end)
    for condition in conditions:
        if not condition.key or condition.WhichOneof("expectation") is None:
            raise InvalidRequestError("a condition needs a key and what must hold for it")


def _within(what: str, measured: int, least: int, limit: int) -> None:
    if not least <= measured <= limit:
        raise InvalidRequestError(
            f"{what}: {measured}, must be {least} to {limit}", measured=measured, limit=limit
        )
