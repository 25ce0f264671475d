"""Every error that crosses the wire, each knowing its own gRPC status.

KvplaneError                       INTERNAL
├── InvalidRequestError            INVALID_ARGUMENT     the caller must change the request
│   ├── InvalidPromptError
│   ├── InvalidSamplingError
│   ├── PromptTooLargeError
│   └── ContextExceededError
├── NotFoundError                  NOT_FOUND            the caller named what is not there
│   ├── ModelNotFoundError
│   ├── NodeNotFoundError
│   └── RequestNotFoundError
├── NodeIdTakenError               ALREADY_EXISTS       another agent has this name
├── PreconditionError              FAILED_PRECONDITION  the caller must act before a retry
│   ├── ConditionFailedError
│   ├── KvBudgetExceededError
│   ├── ReservationUnknownError
│   └── StaleEpochError
├── ExhaustedError                 RESOURCE_EXHAUSTED   the same request may pass later
│   ├── DeadlineUnreachableError
│   ├── KvBlocksBusyError
│   └── QueueFullError
├── UnavailableError               UNAVAILABLE          a part of the cluster is away
│   ├── EngineUnavailableError
│   ├── MetastoreUnavailableError
│   ├── NoNodesError
│   ├── NodeUnreachableError
│   ├── NodeDrainingError
│   └── NodesDrainingError
├── EngineFailedError              ABORTED              the answer broke off after it had begun
└── UnsupportedError               UNIMPLEMENTED
"""

from collections.abc import Iterator
from typing import ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "kvplane"

# A status travels in HTTP/2 headers, twice and encoded, and gRPC drops headers over 8 KiB.
_MAX_MESSAGE_BYTES = 1_000
_MAX_FACT_BYTES = 200


class KvplaneError(Exception):
    """Something went wrong that the caller should hear about.

    `facts` are the numbers behind the message, such as the measured value and the limit; they
    travel as the metadata of a google.rpc.ErrorInfo. `retry_after_ms` is set where waiting may
    help.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, retry_after_ms: int | None = None, **facts: object) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms
        self.facts = {name: str(value) for name, value in facts.items()}

    def to_status(self) -> status_pb2.Status:
        """Return the error as the standard google.rpc.Status, long texts cut."""
        facts = {name: _cut(value, _MAX_FACT_BYTES) for name, value in self.facts.items()}
        info = error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=facts)
        message = _cut(str(self), _MAX_MESSAGE_BYTES)
        status = status_pb2.Status(code=self.code.value[0], message=message)
        status.details.append(_packed(info))
        if self.retry_after_ms is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(self.retry_after_ms)
            status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        return status


class InvalidRequestError(KvplaneError):
    """The request is wrong in itself."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class InvalidPromptError(InvalidRequestError):
    """The prompt is empty or not well formed."""

    reason = "INVALID_PROMPT"


class InvalidSamplingError(InvalidRequestError):
    """A sampling option is out of its range."""

    reason = "INVALID_SAMPLING"


class PromptTooLargeError(InvalidRequestError):
    """The prompt has more bytes than the router takes."""

    reason = "PROMPT_TOO_LARGE"


class ContextExceededError(InvalidRequestError):
    """The prompt has more tokens than the model's context."""

    reason = "CONTEXT_EXCEEDED"


class NotFoundError(KvplaneError):
    """What the caller named is not there."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class ModelNotFoundError(NotFoundError):
    """No node has the model."""

    reason = "MODEL_NOT_FOUND"


class NodeNotFoundError(NotFoundError):
    """No node has that id."""

    reason = "NODE_NOT_FOUND"


class RequestNotFoundError(NotFoundError):
    """The request is unknown or no longer remembered."""

    reason = "REQUEST_NOT_FOUND"


class NodeIdTakenError(KvplaneError):
    """Another live agent uses this node id."""

    code = grpc.StatusCode.ALREADY_EXISTS
    reason = "NODE_ID_TAKEN"


class PreconditionError(KvplaneError):
    """The state of the cluster does not allow it; repeating the same call will not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "PRECONDITION"


class ConditionFailedError(PreconditionError):
    """A condition of a metastore batch does not hold."""

    reason = "CONDITION_FAILED"


class KvBudgetExceededError(PreconditionError):
    """The request needs more KV blocks than the node has in all."""

    reason = "KV_BUDGET_EXCEEDED"


class ReservationUnknownError(PreconditionError):
    """The reservation expired, was used or never was."""

    reason = "RESERVATION_UNKNOWN"


class StaleEpochError(PreconditionError):
    """A newer epoch of the node has registered; the fact `known_epoch` names it."""

    reason = "STALE_EPOCH"


class ExhaustedError(KvplaneError):
    """There is no room now; the same request may pass later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "EXHAUSTED"


class DeadlineUnreachableError(ExhaustedError):
    """No node is expected to give a first token before the caller's deadline."""

    reason = "DEADLINE_UNREACHABLE"


class KvBlocksBusyError(ExhaustedError):
    """Running requests hold the KV blocks that this one needs."""

    reason = "KV_BLOCKS_BUSY"


class QueueFullError(ExhaustedError):
    """Every slot is taken and as many requests wait as may."""

    reason = "QUEUE_FULL"


class UnavailableError(KvplaneError):
    """A part of the cluster cannot be reached."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class EngineUnavailableError(UnavailableError):
    """The engine does not answer, or failed before its first token."""

    reason = "ENGINE_UNAVAILABLE"


class MetastoreUnavailableError(UnavailableError):
    """The metastore does not answer or takes no writes."""

    reason = "METASTORE_UNAVAILABLE"


class NoNodesError(UnavailableError):
    """No node is alive."""

    reason = "NO_NODES"


class NodeUnreachableError(UnavailableError):
    """The registry hears of the node, but the router cannot call it."""

    reason = "NODE_UNREACHABLE"


class NodeDrainingError(UnavailableError):
    """The node takes no new work."""

    reason = "NODE_DRAINING"


class NodesDrainingError(UnavailableError):
    """Every node that has the model takes no new work."""

    reason = "NODES_DRAINING"


class EngineFailedError(KvplaneError):
    """The engine failed after the answer had begun; what was sent is not a whole answer."""

    code = grpc.StatusCode.ABORTED
    reason = "ENGINE_FAILED"


class UnsupportedError(KvplaneError):
    """It is not done in this version."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "UNSUPPORTED"


def from_rpc(error: grpc.aio.AioRpcError) -> KvplaneError:
    """Return the error that the other side raised; one of this tree where it told its reason.

    A peer that could not be reached gives UnavailableError, and so does one that cancelled the
    call: gRPC does that by itself to calls that arrive while their server stops.
    """
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            known = _from_status(value)
            if known is not None:
                return known
    message = error.details() or error.code().name
    left = error.code() is grpc.StatusCode.CANCELLED
    code = grpc.StatusCode.UNAVAILABLE if left else error.code()
    plain = (
        kind for kind in _tree(KvplaneError) if kind.code is code and KvplaneError in kind.__bases__
    )
    return next(plain, KvplaneError)(message)


def _from_status(packed: bytes) -> KvplaneError | None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(packed)
    except DecodeError:
        return None  # of a stranger, whose plain status still tells enough
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    retry_after_ms = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    kind = next((kind for kind in _tree(KvplaneError) if kind.reason == info.reason), None)
    if kind is None or info.domain != DOMAIN:
        return None
    return kind(status.message, retry_after_ms=retry_after_ms, **dict(info.metadata))


def _tree(root: type[KvplaneError]) -> Iterator[type[KvplaneError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def _cut(text: str, most_bytes: int) -> str:
    raw = text.encode(errors="replace")
    if len(raw) <= most_bytes:
        return raw.decode()
    return raw[: most_bytes - 3].decode(errors="ignore") + "..."


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
