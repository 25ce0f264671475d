"""What the metastore can be told."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from kvplane_common.config import ListenAddress, ServiceConfig


class MetastoreConfig(ServiceConfig):
    """The cluster's memory: a small durable key-value store."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_METASTORE_")

    listen: ListenAddress = Field(
        default="127.0.0.1:7702",
        description="host:port to answer on, loopback by default",
    )
    data_dir: Path = Field(
        default=Path("kvplane-data/metastore"),
        description="directory of the log; created where it is missing, and held by one process",
    )
