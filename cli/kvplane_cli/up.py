"""`kvplane up`: a whole cluster on this machine, until Ctrl-C."""

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvplane_cli import options
from kvplane_cli.layout import Addresses, Embedded, Engine, Ports, Upstream
from kvplane_cli.local_cluster import LocalCluster, run_directory
from kvplane_cli.models import embedded_model
from kvplane_cli.probing import OLLAMA_URL, check_engines, ollama_answers
from kvplane_cli.progress import progress
from kvplane_cli.shell import run, stderr

STOPPING = "stopping; running answers have 10 s to end, Ctrl-C again stops now"
"""Said at the first Ctrl-C; the services' own `drain_s` is what running answers have."""
_EMBEDDED_NODES = 2
_EMBEDDED_SLOTS = 2

Nodes = Annotated[
    int | None, typer.Option("--nodes", min=1, max=16, help="Embedded engines; 2 if not given.")
]
Ollama = Annotated[
    str, typer.Option("--ollama", metavar="URL", help="An Ollama that runs already.")
]
LlamaServers = Annotated[
    list[str] | None,
    typer.Option(
        "--llama-server", metavar="URL", help="A llama-server that runs; may be repeated."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="Where data and logs stay; if not given, nowhere."),
]
Policy = Annotated[
    Literal["ttft", "ladder"], typer.Option("--policy", help="How nodes are chosen.")
]
PortBase = Annotated[
    int,
    typer.Option("--port-base", min=1, max=65_000, help="The router's port; the others follow it."),
]


def up(
    nodes: Nodes = None,
    ollama: Ollama = "",
    llama_server: LlamaServers = None,
    model: options.ModelFile = None,
    data_dir: DataDir = None,
    policy: Policy = "ttft",
    port_base: PortBase = options.DEFAULT_PORT,
) -> None:
    """Run a whole cluster on this machine, until Ctrl-C.

    Its engines are those that are named, else an Ollama that runs here, else embedded ones.
    """
    urls = [*(llama_server or ()), *([ollama] if ollama else [])]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise typer.BadParameter(f"{url!r} does not begin with http:// or https://")
    given = [Upstream(url.rstrip("/")) for url in urls]
    if given and (nodes or model):
        raise typer.BadParameter("--nodes and --model are for embedded engines, without URLs")
    run(_up(given, nodes, model, data_dir, policy, port_base))


async def _up(
    given: Sequence[Upstream],
    nodes: int | None,
    model: Path | None,
    data_dir: Path | None,
    policy: str,
    port_base: int,
) -> None:
    interrupts = _Interrupts()
    try:
        await check_engines(given)
        engines = given or await _found_engines(nodes, model)
        ports = Ports.from_base(port_base, len(engines))
        ports.check_free()
        with run_directory(data_dir) as run_dir:
            cluster = LocalCluster(engines, run_dir, ports=ports, policy=policy)
            await _until_death(cluster, engines, interrupts)
    except asyncio.CancelledError:
        stderr().print("stopped")


async def _until_death(
    cluster: LocalCluster, engines: Sequence[Engine], interrupts: "_Interrupts"
) -> None:
    with progress(stderr(), "starting the cluster") as starting:
        interrupts.on_first, interrupts.on_second = starting.stop, cluster.kill_all
        async with cluster:
            starting.stop()
            for line in announcement(cluster.addresses, engines):
                typer.echo(line)
            raise await cluster.first_death()


class _Interrupts:
    """The first Ctrl-C cancels this task, for an orderly stop; later ones cut that short."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] = _nothing
        self.on_second: Callable[[], None] = _nothing
        self._task = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupted)

    def _interrupted(self) -> None:
        if self._task and self._task.cancelling():
            self.on_second()
        elif self._task:
            self.on_first()
            stderr().print(STOPPING)
            self._task.cancel()


def _nothing() -> None:
    """Nothing is running yet."""


async def _found_engines(nodes: int | None, model: Path | None) -> Sequence[Engine]:
    if nodes is None and model is None and await ollama_answers():
        return [Upstream(OLLAMA_URL)]
    otherwise = ", or name an engine of your own with --llama-server URL or --ollama URL"
    file, alias = embedded_model(model, otherwise=otherwise)
    engine = Embedded(file, alias, slots=_EMBEDDED_SLOTS)
    return [engine] * (nodes or _EMBEDDED_NODES)


def announcement(at: Addresses, engines: Sequence[Engine]) -> Iterator[str]:
    """Yield the lines that tell where everything is and what to try; commands one a line."""
    services = {"router": at.router, "registry": at.registry, "metastore": at.metastore}
    for name, address in services.items():
        yield f"{name:<10} {address}"
    for (node_id, address), engine in zip(at.agents.items(), engines, strict=True):
        what = engine.alias if isinstance(engine, Embedded) else engine.url
        yield f"{node_id:<10} {address}  {what}"
    yield "\nTry, in another terminal, and Ctrl-C here to stop:"
    if at.router != options.ROUTER:
        for name, address in services.items():
            yield f"  export KVPLANE_{name.upper()}={address}"
    yield '  kvplane generate "What is a KV cache?"'
    yield "  kvplane explain"
