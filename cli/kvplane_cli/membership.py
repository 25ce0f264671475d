"""`kvplane drain`, `kvplane undrain` and `kvplane forget`: which nodes take part."""

from typing import Annotated

import typer

from kvplane.common.v1 import node_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane_cli import clients, options
from kvplane_cli.nodes import to_json
from kvplane_cli.render import show_json
from kvplane_cli.shell import CliError, run, stdout

NodeId = Annotated[str, typer.Argument(help="The node, as `kvplane nodes` names it.")]


def drain(
    node_id: NodeId,
    as_json: options.Json = False,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """Keep new work away from a node; running work goes on. Remembered over restarts."""
    _drain(node_id, registry, draining=True, as_json=as_json)


def undrain(
    node_id: NodeId,
    as_json: options.Json = False,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """Let new work come to a node again."""
    _drain(node_id, registry, draining=False, as_json=as_json)


def _drain(node_id: str, registry: str, *, draining: bool, as_json: bool) -> None:
    node = run(_set_draining(node_id, registry, draining=draining))
    if as_json:
        show_json(to_json(node))
    else:
        stdout().print(f"{node.node_id} {'takes no new work' if draining else 'takes work again'}")


async def _set_draining(node_id: str, registry: str, *, draining: bool) -> node_pb2.Node:
    async with clients.registry(registry) as stub:
        request = registry_pb2.DrainRequest(node_id=node_id, draining=draining)
        return (await stub.Drain(request, timeout=clients.CALL_S)).node


def forget(node_id: NodeId, registry: options.Registry = options.REGISTRY) -> None:
    """Forget a node whose machine is gone for good."""
    run(_forget(node_id, registry))
    stdout().print(f"{node_id} is forgotten")


async def _forget(node_id: str, registry: str) -> None:
    known = {node.node_id: node for node in await clients.list_nodes(registry)}
    if node_id not in known:
        raise CliError(f"there is no node {node_id!r}; there are: {', '.join(known) or 'none'}")
    if known[node_id].state == node_pb2.Node.STATE_READY:
        raise CliError(f"{node_id} is alive, and would register again: stop its agent first")
    async with clients.registry(registry) as stub:
        # Epoch 0: whatever epoch it has, and even where a drain would be remembered.
        request = registry_pb2.DeregisterRequest(node_id=node_id, epoch=0)
        await stub.Deregister(request, timeout=clients.CALL_S)
