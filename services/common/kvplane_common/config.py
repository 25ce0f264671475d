"""Configuration from flags, environment and a TOML file, in that order of precedence."""

import argparse
import os
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvplane_common.addresses import check_address

Address = Annotated[str, AfterValidator(check_address)]
"""host:port of another service."""

ListenAddress = Annotated[str, AfterValidator(partial(check_address, port_zero=True))]
"""host:port to answer on; port 0 takes any free one."""


class ServiceConfig(BaseSettings):
    """What every service can be told. A subclass adds its own fields and its `env_prefix`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    config: Path | None = Field(default=None, description="TOML file with any of these settings")
    listen: ListenAddress = Field(description="host:port to answer on, loopback by default")
    drain_s: float = Field(
        default=10.0, ge=0, description="seconds that running work gets to end after SIGTERM"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least severe log line that is written"
    )
    log_format: Literal["json", "text"] = Field(
        default="json", description="one JSON object a line, or text for people"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the environment over the file, whose values come in as `init_settings`."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings


Config = TypeVar("Config", bound=ServiceConfig)


def load(kind: type[Config], program: str, arguments: list[str]) -> Config:
    """Return the configuration of `program`, or exit with status 2 and say what was wrong.

    `--config FILE`, or the variable of that name, names a TOML file whose keys are the field names;
    an unknown key is an error.
    """
    path = _config_path(kind, arguments)
    values = _read(kind, program, path) if path else {}
    try:
        cli = CliSettingsSource[argparse.ArgumentParser](
            kind,
            cli_prog_name=program,
            cli_parse_args=arguments,
            cli_kebab_case=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_use_class_docs_for_groups=True,
        )
        return kind(_cli_settings_source=cli, **values)
    except SettingsError as error:
        _fail(program, f'{error}; a table is written as JSON, such as {{"gpu": "rtx-4090"}}')
    except ValidationError as error:
        _fail(program, "; ".join(_words(kind, detail) for detail in error.errors()))


def _config_path(kind: type[Config], arguments: list[str]) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=os.environ.get(_variable(kind, "config")))
    path: str | None = parser.parse_known_args(arguments)[0].config
    return Path(path) if path else None


def _read(kind: type[Config], program: str, path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        _fail(program, f"cannot read {path}: {error}")
    known = sorted(set(kind.model_fields) - {"config"})
    for key in values:
        if key not in known:
            _fail(program, f"{path}: unknown key {key!r}; known keys are {', '.join(known)}")
    return values


def _words(kind: type[Config], detail: Any) -> str:
    message: str = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return message
    name = str(detail["loc"][0])
    if name not in kind.model_fields:
        return f"unknown setting {name!r}"
    flag, variable = f"--{name.replace('_', '-')}", _variable(kind, name)
    return f"{flag} (or {variable}, or {name} in the TOML file): {message}"


def _variable(kind: type[Config], name: str) -> str:
    return f"{kind.model_config.get('env_prefix', '')}{name}".upper()


def _fail(program: str, message: str) -> NoReturn:
    sys.stderr.write(f"{program}: {message}\n")
    raise SystemExit(2)
