"""The nodes as the registry last told them, and which of them to trust."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from google.protobuf.message import Message

from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane_router.index import Home

SUSPECT_MS = 2_000.0
"""How long a failed call is held against a node that says nothing more."""

_LEAST_FIGURE, _MOST_FIGURE = 0.01, 1e12
"""No rate, size or time is outside of these; what is computed from figures within fits the wire."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model on one node, and what it was doing at the last heartbeat. Unknown is None."""

    name: str
    loaded: bool = True
    generation: int = 1
    slots: int = 1
    queue_limit: int = 0
    context_tokens: int | None = None
    kv_bytes_per_token: float | None = None
    prefill_tokens_per_s: float | None = None
    load_ms: float | None = None
    bytes_per_token: float | None = None
    service_ms: float | None = None
    in_flight: int = 0
    """Requests that hold a slot or wait for one."""
    pending_tokens: int = 0
    """Uncached prompt tokens that are not evaluated yet."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node as of its last step."""

    node_id: str
    address: str = ""
    epoch: int = 1
    alive: bool = True
    draining: bool = False
    block_bytes: int | None = None
    total_blocks: int | None = None
    active_blocks: int = 0
    resident_blocks: int = 0
    models: Mapping[str, Model] = field(default_factory=dict)

    def home(self, model: str) -> Home | None:
        """Return where the node caches prompts of `model` now; None while it is not loaded."""
        found = self.models.get(model)
        if found is None or not found.loaded:
            return None
        return Home(self.node_id, model, self.epoch, found.generation)


class Fleet:
    """The nodes by id. While the registry is away it stays as it was."""

    def __init__(self) -> None:
        self.heard = False
        """True once the registry has told its nodes, be they none."""
        self._nodes: dict[str, Node] = {}
        self._suspects: dict[str, float] = {}

    def apply(self, step: registry_pb2.WatchNodesResponse) -> set[str]:
        """Take in a step of the node watch, and return the ids of the nodes that are gone by it.

        To be heard of again clears a node of suspicion.
        """
        self.heard = True
        gone = set(step.removed_node_ids)
        if step.reset:
            gone |= self._nodes.keys() - {told.node_id for told in step.nodes}
        for told in step.nodes:
            self._nodes[told.node_id] = from_proto(told)
            self._suspects.pop(told.node_id, None)
        for node_id in gone:
            self._nodes.pop(node_id, None)
            self._suspects.pop(node_id, None)
        return gone

    def get(self, node_id: str) -> Node | None:
        """Return a node, dead or alive."""
        return self._nodes.get(node_id)

    def alive(self) -> list[Node]:
        """Return the nodes whose lease is alive, draining ones included, by id."""
        return [node for _, node in sorted(self._nodes.items()) if node.alive]

    def addresses(self) -> Collection[str]:
        """Return where the nodes answer."""
        return {node.address for node in self._nodes.values()}

    def suspect(self, node_id: str, now_ms: float) -> None:
        """Note that a call to a node has just failed."""
        self._suspects[node_id] = now_ms + SUSPECT_MS

    def is_suspect(self, node_id: str, now_ms: float) -> bool:
        """Tell whether a call failed and nothing was heard of the node since, for 2 s at most."""
        return now_ms < self._suspects.get(node_id, now_ms)

    def median_of(self, model: str, figure: Callable[[Model], float | None]) -> float | None:
        """Return the median of a model's figure over the nodes that know it, or None."""
        models = (node.models.get(model) for node in self.alive())
        known = [value for found in models if found and (value := figure(found)) is not None]
        return median(known) if known else None


def from_proto(told: node_pb2.Node) -> Node:
    """Return a node as plain data."""
    loads = {load.model: load for load in told.load.models}
    idle = node_pb2.ModelLoad()
    return Node(
        node_id=told.node_id,
        address=told.address,
        epoch=told.epoch,
        alive=told.state == node_pb2.Node.STATE_READY,
        draining=told.draining,
        block_bytes=_known(told.capacity, "block_bytes"),
        total_blocks=_told(told.capacity, "total_blocks"),
        active_blocks=told.load.active_blocks,
        resident_blocks=told.load.resident_blocks,
        models=_by_name(
            _model(model, loads.get(model.name, idle)) for model in told.capacity.models
        ),
    )


def _model(told: node_pb2.Model, load: node_pb2.ModelLoad) -> Model:
    return Model(
        name=told.name,
        loaded=told.loaded,
        generation=told.generation,
        slots=max(1, told.slots),
        queue_limit=told.queue_limit,
        context_tokens=_told(told, "context_tokens"),
        kv_bytes_per_token=_known(told, "kv_bytes_per_token"),
        prefill_tokens_per_s=_known(told, "prefill_tokens_per_s"),
        load_ms=_known(told, "load_ms"),
        bytes_per_token=_known(told, "bytes_per_token"),
        service_ms=_known(told, "service_ms"),
        in_flight=load.active + load.queued,
        pending_tokens=load.pending_prefill_tokens,
    )


def _by_name(models: Iterable[Model]) -> Mapping[str, Model]:
    return {model.name: model for model in models}


def _told(message: Message, name: str) -> Any:
    """Return a count, or None where it is absent: a count of 0 is known."""
    return getattr(message, name) if message.HasField(name) else None


def _known(message: Message, name: str) -> Any:
    """Return a figure, or None where it is absent or nothing that anybody can have measured."""
    value = getattr(message, name)
    return value if _LEAST_FIGURE <= value <= _MOST_FIGURE else None
