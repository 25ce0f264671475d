"""The processes of a local cluster and their commands, in the order of starting."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvplane_cli.layout import HOST, Addresses, Embedded, Engine, Ports, Upstream


@dataclass(frozen=True, slots=True)
class Planned:
    """One process: a Python module and its arguments."""

    name: str
    command: tuple[str, ...]
    address: str | None
    """Where its health service answers, as host:port; None for an engine."""


Wave = tuple[Planned, ...]
"""Processes that may start side by side."""


def plan(engines: Sequence[Engine], ports: Ports, data_dir: Path, policy: str) -> tuple[Wave, ...]:
    """Return the waves in which to start; each needs only what the earlier ones serve.

    The router comes last, so that it knows every node when it says that it can serve.
    """
    at = Addresses.of(ports)
    numbered = tuple(zip(range(1, len(engines) + 1), engines, ports.engines, strict=True))
    peers = (f"--registry={at.registry}", f"--metastore={at.metastore}")
    return (
        (
            _service("metastore", at.metastore, f"--data-dir={data_dir}"),
            *(
                Planned(f"engine-{number}", _engine_command(engine, port), None)
                for number, engine, port in numbered
                if isinstance(engine, Embedded)
            ),
        ),
        (_service("registry", at.registry, f"--metastore={at.metastore}"),),
        tuple(
            _agent(node_id, address, _upstream(engine, port), peers)
            for (node_id, address), (_, engine, port) in zip(
                at.agents.items(), numbered, strict=True
            )
        ),
        (_service("router", at.router, f"--policy={policy}", *peers),),
    )


def _service(name: str, address: str, *flags: str) -> Planned:
    return Planned(name, (f"kvplane_{name}", f"--listen={address}", *flags), address)


def _agent(node_id: str, address: str, engine: Upstream, peers: Sequence[str]) -> Planned:
    command = (
        *("kvplane_node_agent", f"--node-id={node_id}", f"--listen={address}"),
        f"--engine-url={engine.url}",
        *peers,
    )
    return Planned(node_id, command, address)


def _engine_command(engine: Embedded, port: int) -> tuple[str, ...]:
    tie = f"--parent={os.getpid()}"
    return ("kvplane_cli.embedded_engine", f"--port={port}", tie, *_engine_flags(engine))


def _engine_flags(engine: Embedded) -> Iterator[str]:
    yield f"--model={engine.model}"
    yield f"--alias={engine.alias}"
    yield f"--context={engine.context_tokens * engine.slots}"
    yield f"--slots={engine.slots}"
    yield f"--threads={engine.threads}"
    yield f"--cache-ram-mb={engine.cache_ram_mb}"


def _upstream(engine: Engine, port: int) -> Upstream:
    if isinstance(engine, Upstream):
        return engine
    return Upstream(f"http://{HOST}:{port}")
