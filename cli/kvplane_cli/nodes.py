"""`kvplane nodes`: the fleet as the registry knows it."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvplane.common.v1 import node_pb2
from kvplane_cli import clients, options
from kvplane_cli.render import (
    UNKNOWN,
    Column,
    Row,
    iso,
    kind_of,
    known,
    number,
    show,
    text,
)
from kvplane_cli.shell import run


def nodes(
    as_json: options.Json = False,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """List the nodes: where they are, how they are, what they have and do."""
    found = run(clients.list_nodes(registry))
    rows = [to_json(node) for node in found]
    show(rows, COLUMNS, as_json=as_json, empty="no node has registered")


def engine_away(node: node_pb2.Node) -> bool:
    """Tell whether a node's agent is there but its engine is not: then it lists no models."""
    return node.state == node_pb2.Node.STATE_READY and not node.capacity.models


def to_json(node: node_pb2.Node) -> Mapping[str, Any]:
    """Return a node as a JSON object."""
    loads = {load.model: load for load in node.load.models}
    return {
        "node": node.node_id,
        "address": node.address,
        "labels": dict(node.labels),
        "state": kind_of(node_pb2.Node.State.DESCRIPTOR, node.state),
        "engine_away": engine_away(node),
        "draining": node.draining,
        "epoch": node.epoch,
        "engine": node.capacity.engine or None,
        "lease_expire_time": iso(node.lease_expire_time),
        "memory_total_bytes": known(node.capacity, "memory_total_bytes"),
        "memory_source": kind_of(
            node_pb2.Capacity.MemorySource.DESCRIPTOR, node.capacity.memory_source
        ),
        "block_bytes": node.capacity.block_bytes,
        "total_blocks": known(node.capacity, "total_blocks"),
        "active_blocks": node.load.active_blocks,
        "resident_blocks": node.load.resident_blocks,
        "models": [
            _model(model, loads.get(model.name, node_pb2.ModelLoad()))
            for model in node.capacity.models
        ],
    }


def _model(model: node_pb2.Model, load: node_pb2.ModelLoad) -> Mapping[str, Any]:
    optional = (
        *("context_tokens", "kv_bytes_per_token", "prefill_tokens_per_s", "decode_tokens_per_s"),
        *("load_ms", "bytes_per_token", "service_ms"),
    )
    return {
        "name": model.name,
        "loaded": model.loaded,
        "generation": model.generation,
        "slots": model.slots,
        "queue_limit": model.queue_limit,
        "active": load.active,
        "queued": load.queued,
        "pending_prefill_tokens": load.pending_prefill_tokens,
        **{field: known(model, field) for field in optional},
    }


def _state(row: Row) -> str:
    state = "engine away" if row["engine_away"] else str(row["state"])
    return f"{state}, draining" if row["draining"] else state


def _blocks(row: Row) -> str:
    used = row["active_blocks"] + row["resident_blocks"]
    total = row["total_blocks"]
    return UNKNOWN if total is None else f"{used:,}/{total:,}"


def _each(row: Row, cells: Sequence[str]) -> str:
    return "\n".join(cells) if row["models"] else "-"


COLUMNS = (
    text("node", "node"),
    text("address", "address"),
    Column("state", _state, wraps=True),
    Column("model", lambda row: _each(row, [model["name"] for model in row["models"]]), wraps=True),
    Column(
        "slots",
        lambda row: _each(row, [f"{model['active']}/{model['slots']}" for model in row["models"]]),
        right=True,
    ),
    Column("blocks", _blocks, right=True),
    Column(
        "prefill\ntok/s",
        lambda row: _each(row, [number(model["prefill_tokens_per_s"]) for model in row["models"]]),
        right=True,
    ),
)
