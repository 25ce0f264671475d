"""What the registry can be told."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvplane_common.config import Address, ListenAddress, ServiceConfig


class RegistryConfig(ServiceConfig):
    """The registry's settings."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_REGISTRY_")

    listen: ListenAddress = Field(
        default="127.0.0.1:7701",
        description="host:port to answer on, loopback by default",
    )
    metastore: Address = Field(
        default="127.0.0.1:7702", description="host:port of the metastore, which keeps the nodes"
    )
    lease_s: float = Field(
        default=5.0,
        ge=0.5,
        le=3600,
        description="seconds without a heartbeat after which a node counts as lost",
    )
