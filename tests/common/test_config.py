"""Where a setting comes from, and what is said when it is wrong."""

from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from kvplane_common.config import ListenAddress, ServiceConfig, load


class ProbeConfig(ServiceConfig):
    """A service's settings."""

    model_config = SettingsConfigDict(env_prefix="KVPLANE_PROBE_")

    listen: ListenAddress = Field(default="127.0.0.1:1", description="where to listen")
    window_s: float = Field(default=1.0, gt=0, description="a number")
    peers: list[str] = Field(default=[], description="several texts")

    @model_validator(mode="after")
    def _window_fits_the_drain(self) -> "ProbeConfig":
        if self.window_s > 100 * (self.drain_s + 1):
            raise ValueError("the window is longer than the drain allows")
        return self


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "probe.toml"
    path.write_text('window_s = 2.0\nlisten = "127.0.0.1:2"\npeers = ["a:1", "b:2"]\n')
    return path


def test_without_anything_said_the_defaults_hold() -> None:
    assert load(ProbeConfig, "probe", []) == ProbeConfig(listen="127.0.0.1:1")


@pytest.mark.parametrize(
    ("in_file", "in_environment", "in_flags", "window_s"),
    [
        pytest.param(False, False, False, 1.0, id="default"),
        pytest.param(True, False, False, 2.0, id="file over default"),
        pytest.param(True, True, False, 3.0, id="environment over file"),
        pytest.param(False, True, True, 4.0, id="flag over environment"),
        pytest.param(True, False, True, 4.0, id="flag over file"),
        pytest.param(True, True, True, 4.0, id="flag over all"),
    ],
)
def test_flags_win_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch,
    toml: Path,
    in_file: bool,
    in_environment: bool,
    in_flags: bool,
    window_s: float,
) -> None:
    if in_environment:
        monkeypatch.setenv("KVPLANE_PROBE_WINDOW_S", "3.0")
    arguments = ["--config", str(toml)] if in_file else []
    arguments += ["--window-s", "4.0"] if in_flags else []
    config = load(ProbeConfig, "probe", arguments)
    assert config.window_s == window_s
    assert config.listen == ("127.0.0.1:2" if in_file else "127.0.0.1:1")


@pytest.mark.parametrize("flag", ["--config {}", "--config={}"])
def test_the_file_gives_lists_and_keeps_what_it_does_not_name(toml: Path, flag: str) -> None:
    config = load(ProbeConfig, "probe", flag.format(toml).split())
    assert config.peers == ["a:1", "b:2"]
    assert config.drain_s == 10.0
    assert config.config == toml


def test_the_environment_can_name_the_file(monkeypatch: pytest.MonkeyPatch, toml: Path) -> None:
    monkeypatch.setenv("KVPLANE_PROBE_CONFIG", str(toml))
    assert load(ProbeConfig, "probe", []).window_s == 2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ["--window-s", "soon"], "--window-s (or KVPLANE_PROBE_WINDOW_S", id="no number"
        ),
        pytest.param(["--window-s", "0"], "greater than 0", id="out of range"),
        pytest.param(["--listen", "7700"], "--listen (or KVPLANE_PROBE_LISTEN", id="no address"),
        pytest.param(["--log-level", "loud"], "--log-level", id="no level"),
        pytest.param(["--window", "2"], "unrecognized arguments: --window", id="unknown flag"),
        pytest.param(["--window_s", "2"], "unrecognized arguments", id="a flag with underscores"),
        pytest.param(["2"], "unrecognized arguments: 2", id="a word without a flag"),
        pytest.param(["--window-s"], "expected one argument", id="a flag without a value"),
        pytest.param(["--conf", "x"], "unrecognized arguments", id="a flag cut short"),
        pytest.param(
            ["--window-s", "9999"], "longer than the drain allows", id="settings that do not fit"
        ),
    ],
)
def test_a_bad_flag_ends_with_status_2_and_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(ProbeConfig, "probe", arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPLANE_PROBE_WINDOW_S", "soon")
    with pytest.raises(SystemExit):
        load(ProbeConfig, "probe", [])
    assert "KVPLANE_PROBE_WINDOW_S" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"window = 2", "unknown key 'window'", id="unknown key"),
        pytest.param(b"window-s = 2", "known keys are drain_s, listen", id="a key with a dash"),
        pytest.param(b"config = 'other'", "unknown key 'config'", id="a file naming a file"),
        pytest.param(b"[probe]\nwindow_s = 2", "unknown key 'probe'", id="a table"),
        pytest.param(b"window_s = ", "cannot read", id="malformed"),
        pytest.param(b"listen = '\xff'", "cannot read", id="no UTF-8"),
        pytest.param(b"window_s = 'soon'", "window_s in the TOML file", id="a bad value"),
        pytest.param(b"window_s = [1]", "window_s in the TOML file", id="a value of another kind"),
    ],
)
def test_a_bad_file_ends_with_status_2_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as exit_:
        load(ProbeConfig, "probe", ["--config", str(path)])
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("where", ["missing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(ProbeConfig, "probe", ["--config", str(tmp_path / where)])
    assert exit_.value.code == 2
    assert "probe: cannot read" in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(ProbeConfig, "probe", ["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for name in ProbeConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in text


def test_a_configuration_does_not_change() -> None:
    config = load(ProbeConfig, "probe", [])
    with pytest.raises(ValidationError):
        setattr(config, "window_s", 3.0)  # noqa: B010 - mypy knows that this fails
