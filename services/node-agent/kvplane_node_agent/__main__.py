"""The `kvplane-node-agent` program."""

from kvplane_common.serving import run
from kvplane_node_agent.config import NodeAgentConfig
from kvplane_node_agent.service import serve


def main() -> None:
    """Run the node agent until SIGTERM or SIGINT."""
    run(NodeAgentConfig, "kvplane-node-agent", serve)


if __name__ == "__main__":
    main()
