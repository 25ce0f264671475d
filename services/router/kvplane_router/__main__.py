"""The `kvplane-router` program."""

from kvplane_common.serving import run
from kvplane_router.config import RouterConfig
from kvplane_router.service import serve


def main() -> None:
    """Run the router until SIGTERM or SIGINT."""
    run(RouterConfig, "kvplane-router", serve)


if __name__ == "__main__":
    main()
