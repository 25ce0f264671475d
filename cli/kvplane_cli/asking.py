"""Asking the router, and what came of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from kvplane.common.v1 import generation_pb2, node_pb2, prompt_pb2
from kvplane.router.v1 import router_pb2, router_pb2_grpc
from kvplane_cli import clients
from kvplane_cli.completions import completion_json
from kvplane_cli.render import kind_of, milliseconds, name_of, number
from kvplane_cli.shell import CliError
from kvplane_common.clock import Clock
from kvplane_common.errors import from_rpc


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. What nobody measured is None."""

    text: str
    decision: router_pb2.Decision
    completion: generation_pb2.Completion
    ttft_ms: float | None
    """From the call to the first piece of text, by this machine's clock; None without any text."""

    @property
    def stage(self) -> str:
        """The rung of the ladder that won, such as "SESSION"."""
        return name_of(router_pb2.Stage.DESCRIPTOR, self.decision.stage)

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the whole prompt, as the engine counted them."""
        usage = self.completion.usage
        return usage.prompt_tokens if usage.HasField("prompt_tokens") else None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from the KV cache."""
        usage = self.completion.usage
        return usage.cached_tokens if usage.HasField("cached_tokens") else None

    @property
    def evidence(self) -> str | None:
        """How `cached_tokens` is known: predicted, inferred or measured."""
        return kind_of(generation_pb2.Evidence.DESCRIPTOR, self.completion.usage.evidence)

    def to_json(self) -> Mapping[str, Any]:
        """Return what there is to know, as a JSON object; `ttft_ms` by this machine's clock."""
        return {
            "request_id": self.decision.request_id,
            "node": self.decision.node_id,
            "stage": self.stage,
            "text": self.text,
            **completion_json(self.completion),
            "ttft_ms": self.ttft_ms,
        }

    def summary(self) -> str:
        """Return the one line that people want beside the text."""
        kind = "" if self.evidence in (None, "measured") else f" ({self.evidence})"
        return (
            f"{self.decision.node_id}  {self.stage}  prompt {number(self.prompt_tokens)} tokens, "
            f"cached {number(self.cached_tokens)}{kind}  TTFT {milliseconds(self.ttft_ms)}"
        )


def sampling(max_tokens: int | None, temperature: float | None) -> prompt_pb2.Sampling:
    """Return the sampling; what is None is left to the engine."""
    return prompt_pb2.Sampling(max_tokens=max_tokens, temperature=temperature)


def only_model(nodes: Sequence[node_pb2.Node]) -> str:
    """Return the model of a fleet that has just one. Raises CliError for none or several."""
    ready = (node for node in nodes if node.state == node_pb2.Node.STATE_READY)
    names = sorted({model.name for node in ready for model in node.capacity.models})
    if not names:
        raise CliError("no node that is ready has a model; `kvplane nodes` shows what there is")
    if len(names) > 1:
        raise CliError(f"name a model with --model; the fleet has {', '.join(names)}")
    return names[0]


async def the_only_model(registry: str) -> str:
    """Return the model of a fleet that has just one, as the registry tells. Raises CliError."""
    try:
        nodes = await clients.list_nodes(registry)
    except CliError as error:
        told = str(error).removesuffix(".")
        raise CliError(f"{told}. A request that names its --model does without it.") from error
    return only_model(nodes)


class _Coming:
    """An answer while it comes."""

    def __init__(self, clock: Clock, on_text: Callable[[str], None] | None) -> None:
        self._clock = clock
        self._on_text = on_text
        self._started_ms = clock.monotonic_ms()
        self._ttft_ms: float | None = None
        self._decision = router_pb2.Decision()
        self._completion: generation_pb2.Completion | None = None
        self.text = ""

    def take(self, step: router_pb2.GenerateResponse) -> None:
        match step.WhichOneof("event"):
            case "decision":
                self._decision = step.decision
            case "delta" if step.delta.text:
                self._take_text(step.delta.text)
            case "completion":
                self._completion = step.completion

    def answer(self) -> Answer:
        if self._completion is None:
            raise CliError("the router's answer broke off without an end")
        return Answer(self.text, self._decision, self._completion, self._ttft_ms)

    def _take_text(self, text: str) -> None:
        if self._ttft_ms is None:
            self._ttft_ms = self._clock.monotonic_ms() - self._started_ms
        self.text += text
        if self._on_text:
            self._on_text(text)


async def ask(
    stub: router_pb2_grpc.RouterServiceStub,
    request: router_pb2.GenerateRequest,
    clock: Clock,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Run `request` and hand each piece of the answer to `on_text` as it comes.

    Raises the call's AioRpcError, and CliError for an answer that began and has no end.
    """
    coming = _Coming(clock, on_text)
    try:
        async for step in stub.Generate(request):
            coming.take(step)
    except grpc.aio.AioRpcError as error:
        if not coming.text:
            raise
        told = clients.reason(from_rpc(error))
        raise CliError(
            f"the answer broke off after {len(coming.text):,} characters: {told}"
        ) from error
    return coming.answer()
