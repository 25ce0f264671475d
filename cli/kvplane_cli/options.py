"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

from kvplane_common.addresses import check_address

DEFAULT_PORT = 7700
"""Port of the router; the other services follow it."""
ROUTER = f"127.0.0.1:{DEFAULT_PORT}"
REGISTRY = f"127.0.0.1:{DEFAULT_PORT + 1}"
METASTORE = f"127.0.0.1:{DEFAULT_PORT + 2}"


def _address(value: str) -> str:
    try:
        return check_address(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _door(flag: str, variable: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        flag, envvar=variable, callback=_address, metavar="HOST:PORT", help=f"Where {what} answers."
    )
    return option


Router = Annotated[str, _door("--router", "KVPLANE_ROUTER", "the router")]
Registry = Annotated[str, _door("--registry", "KVPLANE_REGISTRY", "the registry")]
Metastore = Annotated[str, _door("--metastore", "KVPLANE_METASTORE", "the metastore")]

Json = Annotated[bool, typer.Option("--json", help="Print JSON; what is unknown is null.")]

_PROMPT = typer.Argument(help="What to ask; - reads it from standard input.")
Prompt = Annotated[str, _PROMPT]
OptionalPrompt = Annotated[str | None, _PROMPT]
Model = Annotated[
    str, typer.Option("--model", help="The model; needless where the fleet has only one.")
]
Session = Annotated[
    str,
    typer.Option(
        "--session",
        metavar="NAME",
        help="A name for the conversation: its turns go to the node that knows it; each call "
        "sends what it is given and nothing else.",
    ),
]
Messages = Annotated[
    typer.FileText | None,
    typer.Option(
        "--messages",
        metavar="FILE",
        encoding="utf-8",
        help='Conversation to send before the prompt: a JSON list of {"role": ..., '
        '"content": ...}; - reads it from standard input.',
    ),
]
System = Annotated[str, typer.Option("--system", help="System message before the prompt.")]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Most tokens to generate.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")
]
ModelFile = Annotated[
    Path | None, typer.Option("--model", metavar="FILE", help="GGUF file for embedded engines.")
]
