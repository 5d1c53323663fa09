"""Parts that the commands share: the options that choose a configuration, exit codes, times and tables, and failing."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, get_args

import click

from executor_server.core.config import BackendName, Config, ConfigError, load

EXIT_HOST = 1
EXIT_CONFIG = 3
EXIT_PLACE = 4
EXIT_INTERRUPTED = 130

_SPAN = re.compile(r"([1-9][0-9]{0,8})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

_CONFIG = click.option(
    "--config",
    "config_path",
    envvar="EXECUTOR_CONFIG",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file. Default: $EXECUTOR_CONFIG, else all defaults.",
)
_LISTEN = click.option(
    "--listen",
    multiple=True,
    metavar="ADDRESS",
    help="HOST:PORT or unix:/PATH, besides the Unix socket of the state directory, which is always there. Takes the "
    "place of server.listen. Default: 127.0.0.1:50051, if it is free.",
)
_BACKEND = click.option(
    "--backend",
    type=click.Choice(get_args(BackendName)),
    help="Sandbox backend; overrides server.backend and other_backends.",
)
_STATE_DIR = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Default: $EXECUTOR_STATE_DIR, else ~/.local/state/remote-executor.",
)


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `load_config` that choose the configuration."""
    return _CONFIG(_LISTEN(_BACKEND(_STATE_DIR(command))))


def fronting(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `load_config` that choose the configuration of a front, which has no backend."""
    return _CONFIG(_LISTEN(_STATE_DIR(command)))


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of `load_config` that choose the daemon's files."""
    return _CONFIG(_STATE_DIR(command))


def start_collector() -> None:
    """Starts the garbage collector, if `__main__` has stopped it, for objects made from now on.

    Existing objects, mostly modules, stay as long as the process: collections skip them.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def load_config(**options: Any) -> Config:
    """Returns the configuration, as `read_config` does. Ends the process with a sentence when it can't be used."""
    try:
        return read_config(**options)
    except ConfigError as error:
        fail_config(error)


def read_config(
    config_path: Path | None,
    state_dir: Path | None,
    listen: Sequence[str] = (),
    backend: str | None = None,
    policy_file: Path | None = None,
    fleet: Mapping[str, object] | None = None,
) -> Config:
    """Returns the configuration that the options choose. Raises ConfigError."""
    server: dict[str, Any] = {}
    if listen:
        server["listen"] = list(listen)
    if backend is not None:
        server["backend"], server["other_backends"] = backend, ()
    if state_dir is not None:
        server["state_dir"] = state_dir.absolute()
    policy = {"file": policy_file.absolute()} if policy_file is not None else {}
    return load(config_path, {"server": server, "policy": policy, "fleet": fleet or {}})


def fail_config(error: ConfigError) -> NoReturn:
    fail(EXIT_CONFIG, "The configuration can't be used:\n" + "\n".join(f"  {line}" for line in error.problems))


def fail(exit_code: int, text: str) -> NoReturn:
    click.echo(text, err=True)
    raise SystemExit(exit_code)


def span_of(text: str) -> timedelta | None:
    """Returns the span that a text like `30m`, `2h` or `7d` names; None for any other text."""
    match = _SPAN.fullmatch(text)
    return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match is not None else None


def print_table(rows: Sequence[Sequence[str]]) -> None:
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """Replaces characters that could steer a terminal: names and messages may come from clients."""
    return "".join(char if char.isprintable() else "?" for char in text)
