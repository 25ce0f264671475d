"""What an adapter has to be told about its engine."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Where the engine answers, and what only its operator knows of it."""

    url: str
    """Base URL, such as http://127.0.0.1:11434."""
    api_key: str = field(default="", repr=False)
    """Sent as a bearer token unless empty; never logged."""
    connect_s: float = 2.0
    """Longest wait for a connection, in seconds."""
    query_s: float = 10.0
    """Longest wait for an answer about the engine itself, in seconds. A busy engine answers late,
    and one that is gone refuses at once."""
    read_idle_s: float | None = None
    """Longest silence within an answer, in seconds. None: any, as a long prefill may be silent."""
    slots: int | None = None
    """Requests that Ollama decodes side by side (its OLLAMA_NUM_PARALLEL); it does not tell."""
    context_tokens: int | None = None
    """Context of one slot that Ollama is asked for, always the same: another one would make it load
    the model again. None: Ollama's own choice."""
    kv_bytes_per_token: float | None = None
    """KV cache bytes of one token. None: worked out from the model's geometry."""
    cache_type: str = "f16"
    """Type of the KV cache's values, as in the engine's --cache-type-k or OLLAMA_KV_CACHE_TYPE."""
