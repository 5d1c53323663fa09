"""`executor-server gateway` and `executor-server console`: processes that serve HTTP as clients of the daemon."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from executor_server.core.config import ConfigError, StateDirError, load
from executor_server.daemon.cli.shared import EXIT_CONFIG, EXIT_PLACE, fail, fail_config, placed, start_collector

Command = Callable[..., None]
_FILE = click.Path(path_type=Path, dir_okay=False)


def _option(name: str, section: str, what: str = "", **options: Any) -> Callable[[Command], Command]:
    return click.option(f"--{name}", help=f"Replaces {section}.{name.replace('-', '_')}{what}.", **options)


@click.command()
@placed
@_option("listen", "gateway", ". Default: 127.0.0.1:3000", metavar="HOST:PORT")
@_option("daemon", "gateway", ". Default: the socket in the state directory", metavar="ADDRESS")
@_option("domain", "gateway", ": sandboxes are at PORT-ID.NAME", metavar="NAME")
@_option("tls-cert", "gateway", type=_FILE)
@_option("tls-key", "gateway", type=_FILE)
def gateway(config_path: Path | None, state_dir: Path | None, **options: Any) -> None:
    """Serves HTTP, the Connect protocol and E2B's protocol until SIGTERM or SIGINT, as a client of the daemon."""
    _run("gateway", config_path, state_dir, options)


@click.command()
@placed
@_option("listen", "console", ". Default: 127.0.0.1:8088", metavar="HOST:PORT")
@_option("daemon", "console", ". Default: the socket in the state directory", metavar="ADDRESS")
@_option("token-file", "console", ". Default: the state directory's token, an admin's", type=_FILE)
@click.option("--actions", is_flag=True, help="Sets console.actions: people may decide approvals, end sessions, drain.")
@_option("tls-cert", "console", type=_FILE)
@_option("tls-key", "console", type=_FILE)
@click.option("--link", is_flag=True, help="Print the one-time link of the running console, and exit.")
def console(config_path: Path | None, state_dir: Path | None, link: bool, **options: Any) -> None:
    """Serves pages for people until SIGTERM or SIGINT, as a client of the daemon, and prints a one-time link."""
    _run("console", config_path, state_dir, options, link=link)


def _run(
    name: str, config_path: Path | None, state_dir: Path | None, options: dict[str, Any], *, link: bool = False
) -> None:
    own = {key: value.absolute() if isinstance(value, Path) else value for key, value in options.items() if value}
    server = {"state_dir": state_dir.absolute()} if state_dir is not None else {}
    try:
        config = load(config_path, {name: own, "server": server})
    except ConfigError as error:
        fail_config(error)
    # Imported here: the other commands need neither the client nor an HTTP server.
    try:
        process = import_module(f"executor_server.{name}.server")
    except ModuleNotFoundError as error:
        fail(EXIT_CONFIG, f"executor-server {name}: {error}: pip install 'remote-executor[{name}]'")
    from executor_server.core import AddressError, logs
    from executor_server.web import StartError

    logs.configure(config.log.level, config.log.format)
    start_collector()
    try:
        if link:
            click.echo(process.link(config))
        else:
            process.serve(config)
    except StartError as error:
        fail(EXIT_CONFIG, str(error))
    except (StateDirError, AddressError) as error:
        fail(EXIT_PLACE, f"executor-server {name}: {error}")  # `make serve` shows it next to the daemon's output
