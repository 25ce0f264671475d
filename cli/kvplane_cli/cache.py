"""`kvplane cache` and `kvplane sessions`: what is remembered, and what of it still lives."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kvplane.common.v1 import generation_pb2, node_pb2, records_pb2
from kvplane_cli import clients, options
from kvplane_cli.nodes import engine_away
from kvplane_cli.render import UNKNOWN, Column, Row, ago, count, iso, kind_of, number, show, text
from kvplane_cli.shell import CliError, run, stderr, stdout
from kvplane_common.chains import DIGEST_BYTES
from kvplane_common.clock import SystemClock
from kvplane_common.keys import CACHE_PREFIX, SESSION_PREFIX

_DIGEST_SHOWN = 8
"""Hexadecimal digits of a digest that a table shows."""

Nodes = Mapping[str, node_pb2.Node] | None
"""The registry's nodes by id; None where it does not answer."""

_Record = TypeVar("_Record", bound=Message)


def cache(
    as_json: options.Json = False,
    metastore: options.Metastore = options.METASTORE,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """List the prompts whose KV cache is believed to be on a node."""
    records, nodes = run(_read(records_pb2.Residency, CACHE_PREFIX, metastore, registry))
    rows = [residency_json(record, nodes) for record in records]
    show(rows, cache_columns(), as_json=as_json, empty="nothing is cached yet")
    if not as_json and any(_is_guess(row) for row in rows):
        stdout().print("~ predicted or inferred: not counted by the engine")


def sessions(
    as_json: options.Json = False,
    metastore: options.Metastore = options.METASTORE,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """List the conversations, and the nodes that know them."""
    records, nodes = run(_read(records_pb2.Session, SESSION_PREFIX, metastore, registry))
    rows = [session_json(record, nodes) for record in records]
    show(rows, _session_columns(rows), as_json=as_json, empty="there is no session yet")


async def _read(
    kind: type[_Record], prefix: bytes, metastore: str, registry: str
) -> tuple[Sequence[_Record], Nodes]:
    async with clients.metastore(metastore) as client:
        kvs, _ = await client.range(prefix)
    records = [_parse(kind, kv.key, kv.value) for kv in kvs]
    try:
        found = await clients.list_nodes(registry)
    except CliError as error:
        stderr().print(f"which records are dead is unknown: {error}", style="yellow")
        return records, None
    return records, {node.node_id: node for node in found}


def _parse(kind: type[_Record], key: bytes, value: bytes) -> _Record:
    try:
        return kind.FromString(value)
    except DecodeError as error:
        raise CliError(f"the record {key.decode(errors='replace')} is not readable") from error


def residency_json(record: records_pb2.Residency, nodes: Nodes) -> Mapping[str, Any]:
    """Return a cache record as a JSON object.

    `dead` says why it is, "" while it lives; `engine_away` that nobody can tell until it is back.
    """
    return {
        "node": record.node_id,
        "model": record.model,
        "digest": record.chain.digests[-DIGEST_BYTES:].hex(),
        "tokens": record.tokens,
        "kv_bytes": record.kv_bytes or None,
        "blocks": record.blocks,
        "evidence": kind_of(generation_pb2.Evidence.DESCRIPTOR, record.evidence),
        "hits": record.hits,
        "create_time": iso(record.create_time),
        "last_use_time": iso(record.last_use_time),
        "epoch": record.epoch,
        "generation": record.generation,
        "dead": _dead(record.node_id, record.epoch, nodes)
        or _reloaded(record.model, record.generation, nodes, record.node_id),
        "engine_away": _engine_away(record.node_id, nodes),
    }


def session_json(record: records_pb2.Session, nodes: Nodes) -> Mapping[str, Any]:
    """Return a session as a JSON object; `dead` says why its cache is, "" while that lives."""
    return {
        "tenant": record.tenant,
        "session": record.session_id,
        "model": record.model,
        "node": record.node_id,
        "epoch": record.epoch,
        "tokens": record.tokens or None,
        "expire_time": iso(record.expire_time),
        "dead": _dead(record.node_id, record.epoch, nodes),
        "engine_away": _engine_away(record.node_id, nodes),
    }


def _dead(node_id: str, epoch: int, nodes: Nodes) -> str | None:
    if nodes is None:
        return None
    node = nodes.get(node_id)
    if node is None:
        return "node gone"
    if node.state != node_pb2.Node.STATE_READY:
        return "node lost"
    return "" if node.epoch == epoch else "restarted"


def _reloaded(model_name: str, generation: int, nodes: Nodes, node_id: str) -> str | None:
    if nodes is None:
        return None
    models = nodes[node_id].capacity.models if node_id in nodes else ()
    model = next((model for model in models if model.name == model_name), None)
    return "reloaded" if model and model.generation != generation else ""


def _engine_away(node_id: str, nodes: Nodes) -> bool | None:
    if nodes is None:
        return None
    return node_id in nodes and engine_away(nodes[node_id])


def cache_columns() -> Sequence[Column]:
    """Return the columns of cache records; they fit in 80 characters."""
    return (
        text("node", "node"),
        text("model", "model", wraps=True),
        Column("digest", lambda row: str(row["digest"][:_DIGEST_SHOWN])),
        Column("tokens", _tokens, right=True),
        count("hits", "hits"),
        _idle(),
        _STATE,
    )


def _session_columns(rows: Sequence[Row]) -> Sequence[Column]:
    tenant = (
        [text("tenant", "tenant", wraps=True)] if len({row["tenant"] for row in rows}) > 1 else []
    )
    return (
        *tenant,
        text("session", "session", wraps=True),
        text("model", "model", wraps=True),
        text("node", "node"),
        count("tokens", "tokens"),
        _when("expires", "expire_time"),
        _STATE,
    )


def _tokens(row: Row) -> str:
    return f"{'~' if _is_guess(row) else ''}{number(row['tokens'])}"


def _is_guess(row: Row) -> bool:
    return bool(row["evidence"] != "measured")


def _state(row: Row) -> str:
    if row["dead"] is None:
        return UNKNOWN
    if row["dead"]:
        return f"dead: {row['dead']}"
    return "engine away" if row["engine_away"] else "live"


_STATE = Column("state", _state)


def _idle() -> Column:
    now_ms = SystemClock().now_ms()
    return Column("idle", lambda row: ago(now_ms, row["last_use_time"]).removesuffix(" ago"))


def _when(title: str, key: str) -> Column:
    now_ms = SystemClock().now_ms()
    return Column(title, lambda row: ago(now_ms, row[key]))
