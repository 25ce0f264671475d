"""`kvplane route`: where a prompt would go, without asking it."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvplane.router.v1 import router_pb2
from kvplane_cli import clients, options
from kvplane_cli.asking import sampling, the_only_model
from kvplane_cli.conversation import conversation
from kvplane_cli.decisions import decision_json, show_decision
from kvplane_cli.render import iso, show_json
from kvplane_cli.shell import run, stdout

Release = Annotated[
    bool, typer.Option("--release", help="Only look: give the reservation back at once.")
]


def route(
    prompt: options.Prompt,
    model: options.Model = "",
    session: options.Session = "",
    system: options.System = "",
    max_tokens: options.MaxTokens = None,
    release: Release = False,
    as_json: options.Json = False,
    router: options.Router = options.ROUTER,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """Choose a node and hold capacity there, for a client that calls the node itself.

    A reservation that nobody uses holds a slot until it expires; --release gives it back at once.
    """
    request = router_pb2.RouteRequest(
        model=model,
        prompt=conversation(prompt, system),
        sampling=sampling(max_tokens, None),
        session_id=session,
    )
    reply = run(_route(request, router, registry, release=release))
    if as_json:
        show_json(_to_json(reply, released=release))
        return
    show_decision(reply.decision)
    held = "was given back" if release else f"is held until {iso(reply.expire_time)}"
    stdout().print(f"go to {reply.address}; reservation {reply.reservation_id} {held}")


async def _route(
    request: router_pb2.RouteRequest, router: str, registry: str, *, release: bool
) -> router_pb2.RouteResponse:
    if not request.model:
        request.model = await the_only_model(registry)
    async with clients.router(router) as stub:
        reply = await stub.Route(request, timeout=clients.CALL_S)
        if release:
            await stub.Release(
                router_pb2.ReleaseRequest(
                    node_id=reply.decision.node_id, reservation_id=reply.reservation_id
                ),
                timeout=clients.CALL_S,
            )
    return reply


def _to_json(reply: router_pb2.RouteResponse, *, released: bool) -> Mapping[str, Any]:
    return {
        "decision": decision_json(reply.decision),
        "address": reply.address,
        "reservation_id": reply.reservation_id,
        "expire_time": iso(reply.expire_time),
        "released": released,
    }
