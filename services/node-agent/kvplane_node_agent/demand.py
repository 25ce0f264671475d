"""What a request needs, estimated before the engine has seen it."""

import math
from dataclasses import dataclass

from kvplane.common.v1 import prompt_pb2
from kvplane_common.chains import Chain
from kvplane_common.requests import DEFAULT_BYTES_PER_TOKEN, least_tokens
from kvplane_node_agent.served import ServedModel


@dataclass(frozen=True, slots=True)
class Demand:
    """One request, as admission sees it."""

    model: str
    chain: Chain | None
    """None: its cache will not be remembered."""
    prompt_bytes: int | None
    """None for a reservation that does not know its prompt."""
    output_tokens: int
    """Most tokens that the answer is expected to have."""

    @property
    def least_prompt_tokens(self) -> int:
        """Tokens that the prompt has at least, whatever its text."""
        return least_tokens(self.prompt_bytes or 0)

    def prompt_tokens(self, model: ServedModel) -> int:
        """Return the estimated tokens of the prompt; 0 for an unknown one."""
        if self.prompt_bytes is None:
            return 0
        per_token = model.rates.bytes_per_token or DEFAULT_BYTES_PER_TOKEN
        return max(1, math.ceil(self.prompt_bytes / per_token))

    def kv_bytes(self, model: ServedModel) -> float | None:
        """Return the KV cache bytes of prompt and answer; None if the geometry is unknown."""
        return self._kv_bytes(model, self.prompt_tokens(model))

    def least_kv_bytes(self, model: ServedModel) -> float | None:
        """Return what `kv_bytes` are if the prompt has as few tokens as it can."""
        return self._kv_bytes(model, self.least_prompt_tokens)

    def _kv_bytes(self, model: ServedModel, prompt_tokens: int) -> float | None:
        tokens = prompt_tokens + self.output_tokens
        if model.info.context_tokens is not None:
            tokens = min(tokens, model.info.context_tokens)
        return model.kv_bytes(tokens)


def text_bytes(prompt: prompt_pb2.Prompt) -> int:
    """Return the bytes of all that a prompt says."""
    if prompt.WhichOneof("kind") == "text":
        return len(prompt.text.encode())
    return sum(len(message.content.encode()) for message in prompt.chat.messages)
