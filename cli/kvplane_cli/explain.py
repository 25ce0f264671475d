"""`kvplane explain`: why a request went where it went, and what came of it."""

from collections.abc import Mapping
from typing import Annotated, Any

import grpc
import typer

from kvplane.router.v1 import router_pb2
from kvplane_cli import clients, options
from kvplane_cli.completions import completion_json
from kvplane_cli.decisions import decision_json, show_decision
from kvplane_cli.render import UNKNOWN, milliseconds, number, show_json, words
from kvplane_cli.shell import CliError, run, stdout
from kvplane_common.errors import RequestNotFoundError, from_rpc

RequestId = Annotated[str, typer.Argument(help="The request; without it the latest one.")]


def explain(
    request_id: RequestId = "",
    as_json: options.Json = False,
    router: options.Router = options.ROUTER,
) -> None:
    """Show every candidate's cost for a recent request, and predicted against actual."""
    reply = run(_explain(request_id, router))
    if as_json:
        show_json(to_json(reply))
        return
    show_decision(reply.decision)
    if not reply.decision.refusal_reason:
        stdout().print(outcome(reply))


async def _explain(request_id: str, router: str) -> router_pb2.ExplainResponse:
    async with clients.router(router) as stub:
        request = router_pb2.ExplainRequest(request_id=request_id)
        try:
            return await stub.Explain(request, timeout=clients.CALL_S)
        except grpc.aio.AioRpcError as error:
            if request_id or not isinstance(from_rpc(error), RequestNotFoundError):
                raise
            raise CliError(f"no request yet: the router at {router} has seen none") from error


def to_json(reply: router_pb2.ExplainResponse) -> Mapping[str, Any]:
    """Return an explanation as a JSON object; `actual` is null until the request ended well."""
    ended = reply.HasField("completion")
    return {
        "decision": decision_json(reply.decision),
        "actual": completion_json(reply.completion) if ended else None,
        "error": reply.error or None,
    }


def outcome(reply: router_pb2.ExplainResponse) -> str:
    """Return predicted against actual, in a line or two for people."""
    if reply.error:
        return f"ended with {reply.error}"
    if not reply.HasField("completion"):
        return "has not ended"
    actual, decision = completion_json(reply.completion), reply.decision
    chosen = (c for c in decision.candidates if c.node_id == decision.node_id)
    expected_ms = next((candidate.total_ms for candidate in chosen), None)
    return (
        f"cached tokens: predicted {number(decision.predicted_cached_tokens)}, "
        f"actual {_cached(actual)}\n"
        f"first token:   predicted {milliseconds(expected_ms)}, "
        f"actual {milliseconds(actual['ttft_ms'])}"
    )


def _cached(actual: Mapping[str, Any]) -> str:
    if actual["cached_tokens"] is None:
        return UNKNOWN
    of = f"{number(actual['cached_tokens'])} of {number(actual['prompt_tokens'])}"
    return f"{of} ({words(actual['evidence'])})"
