"""Nodes, prompts and cached entries in a few words, for tests of what the router decides."""

from typing import Any

from kvplane.common.v1 import node_pb2, prompt_pb2
from kvplane.registry.v1 import registry_pb2
from kvplane_common.chains import Chain
from kvplane_common.keys import cache_key
from kvplane_router.canonical import canonical
from kvplane_router.chain import build
from kvplane_router.decide import Request
from kvplane_router.fleet import Fleet
from kvplane_router.index import Entry, Home

MODEL = "llama"
BLOCK_BYTES = 16 * 1024 * 1024


def model(name: str = MODEL, **told: Any) -> node_pb2.Model:
    """Return a loaded model with two slots, two places to wait and a rate of 1,000 tokens/s."""
    known: dict[str, Any] = {
        "loaded": True,
        "generation": 1,
        "slots": 2,
        "queue_limit": 2,
        "prefill_tokens_per_s": 1000.0,
        "service_ms": 1000.0,
        "bytes_per_token": 4.0,
    }
    return node_pb2.Model(name=name, **{**known, **told})


def node(
    node_id: str,
    *models: node_pb2.Model,
    epoch: int = 1,
    blocks: int | None = None,
    active_blocks: int = 0,
    resident_blocks: int = 0,
    active: int = 0,
    queued: int = 0,
    pending: int = 0,
    **told: Any,
) -> node_pb2.Node:
    """Return a live node; the load is that of its first model."""
    models = models or (model(),)
    load = node_pb2.ModelLoad(
        model=models[0].name, active=active, queued=queued, pending_prefill_tokens=pending
    )
    return node_pb2.Node(
        node_id=node_id,
        epoch=epoch,
        state=told.pop("state", node_pb2.Node.STATE_READY),
        capacity=node_pb2.Capacity(models=models, block_bytes=BLOCK_BYTES, total_blocks=blocks),
        load=node_pb2.Load(
            active_blocks=active_blocks, resident_blocks=resident_blocks, models=[load]
        ),
        **told,
    )


def step(
    *nodes: node_pb2.Node, reset: bool = False, removed: tuple[str, ...] = ()
) -> registry_pb2.WatchNodesResponse:
    """Return a step of the node watch."""
    return registry_pb2.WatchNodesResponse(reset=reset, nodes=nodes, removed_node_ids=removed)


def fleet(*nodes: node_pb2.Node) -> Fleet:
    """Return a fleet of these nodes."""
    made = Fleet()
    made.apply(step(*nodes, reset=True))
    return made


def chat(*contents: str) -> prompt_pb2.Prompt:
    """Return a conversation: a system message, then user and assistant in turn."""
    roles = ["system", *("user", "assistant") * len(contents)]
    pairs = zip(roles, contents, strict=False)
    messages = [prompt_pb2.Message(role=role, content=content) for role, content in pairs]
    return prompt_pb2.Prompt(chat=prompt_pb2.Chat(messages=messages))


def chain(prompt: prompt_pb2.Prompt | str, name: str = MODEL, salt: str = "default") -> Chain:
    """Return the chain of a conversation, or of a text."""
    asked = prompt_pb2.Prompt(text=prompt) if isinstance(prompt, str) else prompt
    return build(canonical(name, salt, asked))


def entry(
    node_id: str, cached: Chain, *, epoch: int = 1, generation: int = 1, **told: Any
) -> Entry:
    """Return a cached prompt, under the key that its agent would give it."""
    home = Home(node_id, told.pop("model", MODEL), epoch, generation)
    values: dict[str, Any] = {"tokens": 0, "last_use_ms": 0, **told}
    return Entry(cache_key(home.node_id, home.model, cached.last), home, cached, **values)


def request(asked: Chain, **told: Any) -> Request:
    """Return a request for an answer of one token."""
    values: dict[str, Any] = {"request_id": "r", "tenant": "default", "answer_tokens": 1, **told}
    return Request(model=values.pop("model", MODEL), chain=asked, **values)
