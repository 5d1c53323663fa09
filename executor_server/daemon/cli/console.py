"""`executor-server console`: serves pages that show what the daemon does, as a client of the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from executor_server.core.config import ConfigError, StateDirError, load
from executor_server.daemon.cli.shared import EXIT_CONFIG, EXIT_PLACE, fail, fail_config, placed, start_collector

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@placed
@click.option("--listen", metavar="HOST:PORT", help="Replaces console.listen. Default: 127.0.0.1:8088.")
@click.option(
    "--daemon", metavar="ADDRESS", help="Replaces console.daemon. Default: the socket in the state directory."
)
@click.option(
    "--token-file", type=_FILE, help="Replaces console.token_file. Default: the state directory's token, an admin's."
)
@click.option("--actions", is_flag=True, help="Sets console.actions: people may decide approvals, end sessions, drain.")
@click.option("--tls-cert", type=_FILE, help="Replaces console.tls_cert.")
@click.option("--tls-key", type=_FILE, help="Replaces console.tls_key.")
@click.option("--link", is_flag=True, help="Print the one-time link of the running console, and exit.")
def console(config_path: Path | None, state_dir: Path | None, link: bool, **options: Any) -> None:
    """Serves pages for people until SIGTERM or SIGINT, as a client of the daemon, and prints a one-time link."""
    own = {key: value.absolute() if isinstance(value, Path) else value for key, value in options.items() if value}
    server = {"state_dir": state_dir.absolute()} if state_dir is not None else {}
    try:
        config = load(config_path, {"console": own, "server": server})
    except ConfigError as error:
        fail_config(error)
    # Imported here: the other commands need neither gRPC nor an HTTP server.
    try:
        from executor_server.console import server as process
    except ModuleNotFoundError as error:
        fail(EXIT_CONFIG, f"executor-server console: {error}: pip install 'remote-executor[console]'")
    from executor_server.core import AddressError, logs

    logs.configure(config.log.level, config.log.format)
    start_collector()
    try:
        if link:
            click.echo(process.link(config))
        else:
            process.serve(config)
    except process.ConsoleError as error:
        fail(EXIT_CONFIG, str(error))
    except (StateDirError, AddressError) as error:
        fail(EXIT_PLACE, f"executor-server console: {error}")  # `make serve` shows it next to the daemon's output
