"""What a local cluster consists of: its engines, its ports and its addresses."""

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvplane_cli.models import CONTEXT_TOKENS
from kvplane_cli.shell import CliError

HOST = "127.0.0.1"
_FIRST_AGENT = 10
"""The first agent's port, counted from the router's."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """An engine that the cluster starts itself."""

    model: Path
    alias: str
    context_tokens: int = CONTEXT_TOKENS
    """Tokens of one slot."""
    slots: int = 1
    threads: int = 1
    cache_ram_mb: int = 1024
    """Host memory for prompts that have left their slot."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """An Ollama or llama-server that runs already; the agent finds out which."""

    url: str


Engine = Embedded | Upstream


@dataclass(frozen=True, slots=True)
class Ports:
    """The loopback ports of a cluster; `engines` are for embedded engines."""

    router: int
    registry: int
    metastore: int
    agents: tuple[int, ...]
    engines: tuple[int, ...]

    @staticmethod
    def from_base(base: int, nodes: int) -> "Ports":
        """Return the documented ports, counted from the router's; engines get any free ones."""
        agents = range(base + _FIRST_AGENT, base + _FIRST_AGENT + nodes)
        return Ports(base, base + 1, base + 2, tuple(agents), free_ports(nodes))

    @staticmethod
    def free(nodes: int) -> "Ports":
        """Return ports that nobody uses now."""
        router, registry, metastore, *rest = free_ports(3 + 2 * nodes)
        return Ports(router, registry, metastore, tuple(rest[:nodes]), tuple(rest[nodes:]))

    def check_free(self) -> None:
        """Raise CliError, naming the first port that is in use."""
        for port in (self.router, self.registry, self.metastore, *self.agents):
            with socket.socket() as probe:
                # As the services do: a port whose last connections linger is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except OSError as error:
                    raise CliError(
                        f"cannot listen on {HOST}:{port}: {error.strerror}. Does another cluster "
                        "run here? Stop it, or choose other ports with --port-base."
                    ) from error


def free_ports(count: int) -> tuple[int, ...]:
    """Return `count` loopback ports that nobody uses now."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return tuple(probe.getsockname()[1] for probe in probes)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the services of a cluster answer, as host:port; the agents by node id."""

    router: str
    registry: str
    metastore: str
    agents: dict[str, str]

    @staticmethod
    def of(ports: Ports) -> "Addresses":
        """Return the addresses for `ports`."""
        return Addresses(
            router=f"{HOST}:{ports.router}",
            registry=f"{HOST}:{ports.registry}",
            metastore=f"{HOST}:{ports.metastore}",
            agents={
                f"node-{number}": f"{HOST}:{port}" for number, port in enumerate(ports.agents, 1)
            },
        )
