"""What the node agent can be told."""

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from kvplane_common.addresses import check_address
from kvplane_common.config import Address, ListenAddress, ServiceConfig
from kvplane_common.node_ids import NODE_ID_RULE, check_node_id

OLLAMA_URL = "http://127.0.0.1:11434"
LLAMA_SERVER_URL = "http://127.0.0.1:8080"

_ANY_HOST = ("0.0.0.0", "[::]")


class NodeAgentConfig(ServiceConfig):
    """The node agent's settings."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_NODE_AGENT_")

    listen: ListenAddress = Field(
        default="127.0.0.1:7710",
        description="host:port to answer on, loopback by default",
    )
    node_id: str = Field(
        default="",
        description=f"name of this node in the cluster, kept over restarts: {NODE_ID_RULE}; empty: "
        "made from the host's name",
    )
    advertise: str = Field(
        default="",
        description="host:port at which routers reach this agent; empty: where it listens",
    )
    registry: Address = Field(default="127.0.0.1:7701", description="host:port of the registry")
    metastore: Address = Field(default="127.0.0.1:7702", description="host:port of the metastore")
    engine_url: str = Field(
        default="",
        description=f"base URL of the engine; empty: Ollama at {OLLAMA_URL}, else llama-server at "
        f"{LLAMA_SERVER_URL}",
    )
    engine_api_key: SecretStr = Field(
        default=SecretStr(""), description="key that the engine wants; better set by environment"
    )
    slots: int = Field(
        default=1,
        ge=1,
        description="requests that Ollama decodes side by side (its OLLAMA_NUM_PARALLEL); "
        "llama-server tells itself",
    )
    context_tokens: int | None = Field(
        default=None, ge=1, description="context of one slot that Ollama is asked for"
    )
    kv_budget_mb: int | None = Field(
        default=None,
        ge=1,
        description="MiB of memory for the KV cache; unset: what the engine has allocated, else "
        "90 % of the GPUs' free memory",
    )
    kv_bytes_per_token: float | None = Field(
        default=None,
        gt=0,
        description="KV cache bytes of a token; unset: from the model's geometry",
    )
    block_mb: int = Field(default=16, ge=1, description="MiB of one KV block")
    memory_mb: int | None = Field(
        default=None, ge=1, description="MiB of memory that the engine can use, if no GPU tells"
    )
    queue_limit: int = Field(
        default=8, ge=0, description="requests of one model that may wait for a slot"
    )
    assumed_output_tokens: int = Field(
        default=256, ge=1, description="tokens of an answer whose request sets no max_tokens"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="labels of this node, for people and for placement"
    )

    @field_validator("advertise")
    @classmethod
    def _advertise_is_an_address(cls, value: str) -> str:
        return check_address(value) if value else value

    @field_validator("node_id")
    @classmethod
    def _node_id_is_legal(cls, value: str) -> str:
        return check_node_id(value) if value else value

    @field_validator("engine_url")
    @classmethod
    def _engine_url_is_http(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} does not begin with http:// or https://")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _others_can_reach_it(self) -> "NodeAgentConfig":
        if self.listen.rpartition(":")[0] in _ANY_HOST and not self.advertise:
            raise ValueError(
                f"listen is {self.listen}, which no router can call: set advertise to the "
                "host:port at which they reach this agent"
            )
        return self
