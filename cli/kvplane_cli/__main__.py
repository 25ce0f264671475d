"""The kvplane command."""

import importlib.metadata
from typing import Annotated

import typer

from kvplane_cli import cache, demo, explain, generate, membership, nodes, route, up
from kvplane_common.logs import configure_logs

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)

for _command in (
    *(up.up, generate.generate, route.route, explain.explain),
    *(nodes.nodes, membership.drain, membership.undrain, membership.forget),
    *(cache.cache, cache.sessions, demo.demo),
):
    app.command()(_command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvplane {importlib.metadata.version('kvplane')}")
        raise typer.Exit


@app.callback()
def kvplane(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Tell the version, and exit."
        ),
    ] = False,
) -> None:
    """Run and ask a fleet of Ollama and llama.cpp machines, and see where its KV cache is."""
    del version


def main() -> None:
    """Run the command."""
    configure_logs("kvplane", "warning", human=True)
    app()


if __name__ == "__main__":
    main()
