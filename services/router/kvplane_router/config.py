"""What the router can be told."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvplane_common.config import Address, ListenAddress, ServiceConfig


class RouterConfig(ServiceConfig):
    """The door for clients: chooses the node where the first token comes soonest."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_ROUTER_")

    listen: ListenAddress = Field(
        default="127.0.0.1:7700",
        description="host:port to answer on, loopback by default",
    )
    registry: Address = Field(
        default="127.0.0.1:7701", description="host:port of the registry, which knows the nodes"
    )
    metastore: Address = Field(
        default="127.0.0.1:7702",
        description="host:port of the metastore, which keeps cached prompts and sessions",
    )
    policy: Literal["ttft", "ladder"] = Field(
        default="ttft",
        description="how to choose a node: soonest first token, or session over exact over "
        "prefix over best fit",
    )
    min_match_tokens: int = Field(
        default=64, ge=1, description="tokens under which a shared beginning counts as not cached"
    )
    session_ttl_s: float = Field(
        default=3600.0, gt=0, description="seconds after its last turn that a session is forgotten"
    )
    max_prompt_bytes: int = Field(
        default=8 * 1024 * 1024,
        ge=1,
        le=16 * 1024 * 1024,
        description="longest prompt that is taken, in bytes",
    )
    max_attempts: int = Field(
        default=3, ge=1, description="nodes that a request is tried on before it fails"
    )
