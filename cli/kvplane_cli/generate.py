"""`kvplane generate`: ask the fleet, and see where the answer came from."""

import sys

import typer

from kvplane.router.v1 import router_pb2
from kvplane_cli import clients, options
from kvplane_cli.asking import Answer, ask, sampling, the_only_model
from kvplane_cli.conversation import conversation
from kvplane_cli.progress import Progress, progress
from kvplane_cli.render import show_json
from kvplane_cli.shell import run, stderr
from kvplane_common.clock import SystemClock


def generate(
    prompt: options.OptionalPrompt = None,
    model: options.Model = "",
    session: options.Session = "",
    messages: options.Messages = None,
    system: options.System = "",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    as_json: options.Json = False,
    router: options.Router = options.ROUTER,
    registry: options.Registry = options.REGISTRY,
) -> None:
    """Ask the fleet; the answer streams to stdout, where it came from to stderr."""
    request = router_pb2.GenerateRequest(
        model=model,
        prompt=conversation(prompt, system, messages),
        sampling=sampling(max_tokens, temperature),
        session_id=session,
    )
    answer = run(_generate(request, router, registry, quiet=as_json))
    if as_json:
        show_json(answer.to_json())
    else:
        stderr().print(answer.summary(), style="dim")


class _Stream:
    """Shows an answer as it comes, and ends its last line whatever ends the answer."""

    def __init__(self, waiting: Progress) -> None:
        self._waiting = waiting
        self._begun = False

    def show(self, text: str) -> None:
        self._waiting.stop()
        self._begun = True
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        if self._begun:
            typer.echo()


async def _generate(
    request: router_pb2.GenerateRequest, router: str, registry: str, *, quiet: bool
) -> Answer:
    if not request.model:
        request.model = await the_only_model(registry)
    with progress(stderr(), "waiting for the first token") as waiting:
        stream = _Stream(waiting)
        try:
            async with clients.router(router) as stub:
                return await ask(stub, request, SystemClock(), None if quiet else stream.show)
        finally:
            stream.end()
