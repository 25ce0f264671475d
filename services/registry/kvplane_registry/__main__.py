"""The `kvplane-registry` program."""

from kvplane_common.serving import run
from kvplane_registry.config import RegistryConfig
from kvplane_registry.service import serve


def main() -> None:
    """Run the registry until SIGTERM or SIGINT."""
    run(RegistryConfig, "kvplane-registry", serve)


if __name__ == "__main__":
    main()
