"""The metastore's process."""

from kvplane_common.serving import run
from kvplane_metastore.config import MetastoreConfig
from kvplane_metastore.service import serve


def main() -> None:
    """Run until SIGTERM."""
    run(MetastoreConfig, "kvplane-metastore", serve)


if __name__ == "__main__":
    main()
