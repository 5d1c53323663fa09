"""`executor-server gateway`: serves HTTP, the Connect protocol and E2B's protocol, as a client of the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from executor_server.core.config import ConfigError, StateDirError, load
from executor_server.daemon.cli.shared import EXIT_CONFIG, EXIT_PLACE, fail, fail_config, placed, start_collector

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@placed
@click.option("--listen", metavar="HOST:PORT", help="Replaces gateway.listen. Default: 127.0.0.1:3000.")
@click.option(
    "--daemon", metavar="ADDRESS", help="Replaces gateway.daemon. Default: the socket in the state directory."
)
@click.option("--domain", metavar="NAME", help="Replaces gateway.domain: sandboxes are at PORT-ID.NAME.")
@click.option("--tls-cert", type=_FILE, help="Replaces gateway.tls_cert.")
@click.option("--tls-key", type=_FILE, help="Replaces gateway.tls_key.")
def gateway(config_path: Path | None, state_dir: Path | None, **options: Any) -> None:
    """Serves HTTP, the Connect protocol and E2B's protocol until SIGTERM or SIGINT, as a client of the daemon."""
    own = {key: value.absolute() if isinstance(value, Path) else value for key, value in options.items() if value}
    server = {"state_dir": state_dir.absolute()} if state_dir is not None else {}
    try:
        config = load(config_path, {"gateway": own, "server": server})
    except ConfigError as error:
        fail_config(error)
    # Imported here: the other commands need neither the client nor an HTTP server.
    try:
        from executor_server.gateway import server as process
    except ModuleNotFoundError as error:
        fail(EXIT_CONFIG, f"executor-server gateway: {error}: pip install 'remote-executor[gateway]'")
    from executor_client.errors import ConfigurationError
    from executor_server.core import AddressError, logs

    logs.configure(config.log.level, config.log.format)
    start_collector()
    try:
        process.serve(config)
    except ConfigurationError as error:
        fail(EXIT_CONFIG, str(error))
    except (StateDirError, AddressError) as error:
        fail(EXIT_PLACE, str(error))
