"""Calls of AdminService for the command line: the options that say where the daemon is, and the forms of answers.

Exit codes in addition to those of other commands: 1 the daemon refused, or could not be reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor_server.core.config import StateDir, StateDirError, default_state_dir, read_token
from executor_server.daemon.cli.shared import EXIT_PLACE, fail, printable

if TYPE_CHECKING:
    from executor_server.api import AdminClient, AdminEndpoint

EXIT_REFUSED = 1

_FILE = click.Path(path_type=Path, dir_okay=False)


def reached(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options for the daemon's address and for the credentials."""
    options = (
        click.option(
            "--address",
            envvar="EXECUTOR_ADDRESS",
            help="host:port or unix:/PATH. Default: $EXECUTOR_ADDRESS, else the daemon of the state directory.",
        ),
        click.option(
            "--token",
            envvar="EXECUTOR_TOKEN",
            help="An admin's token; better in $EXECUTOR_TOKEN, which others can't see. Default: the state directory's, "
            "for a daemon of ours on this machine.",
        ),
        click.option("--tls", is_flag=True, help="Use TLS; implied by the --tls options below."),
        click.option("--tls-ca", type=_FILE, help="CA file. Default: the system's CAs."),
        click.option("--tls-cert", type=_FILE, help="Client certificate; can replace the token."),
        click.option("--tls-key", type=_FILE, help="Key of the client certificate."),
        click.option(
            "--state-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Default: $EXECUTOR_STATE_DIR, else ~/.local/state/remote-executor.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the response as JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def asked(access: Mapping[str, Any], ask: Callable[[AdminClient], dict[str, Any]]) -> dict[str, Any]:
    """Returns the daemon's answer. If it is missing or a refusal, exits with a sentence."""
    # Imported here: the other commands don't need gRPC.
    from executor_server.api import AdminError, admin_client

    try:
        with admin_client(_endpoint(**access)) as client:
            return ask(client)
    except AdminError as error:
        fail(EXIT_REFUSED, "\n".join(printable(line) for line in str(error).split("\n")))


def _endpoint(
    address: str | None,
    token: str | None,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    state_dir: Path | None,
) -> AdminEndpoint:
    from executor_server.api import AdminEndpoint, is_own

    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key must be given together")
    own = StateDir(state_dir.absolute() if state_dir is not None else default_state_dir())
    address = address or f"unix:{own.socket_path}"
    if token is None and tls_cert is None and is_own(address):
        token = _own_token(own)
    return AdminEndpoint(
        address=address,
        token=token,
        tls=tls or any((tls_ca, tls_cert, tls_key)),
        ca=tls_ca,
        cert=tls_cert,
        key=tls_key,
    )


def _own_token(own: StateDir) -> str | None:
    """Returns the state directory's token, None when it has none; the peer socket or a certificate may do instead."""
    try:
        return read_token(own.token_path)
    except FileNotFoundError:
        return None
    except StateDirError as error:
        fail(EXIT_PLACE, str(error))


def print_json(answer: Mapping[str, Any]) -> None:
    click.echo(json.dumps(answer, indent=2))


def number_of(value: float | str) -> str:
    number = float(value)
    return f"{int(number):,}" if number.is_integer() else f"{number:,.1f}"


def time_of(session: Mapping[str, Any], name: str) -> str:
    return str(session.get(name, ""))[:16].replace("T", " ")
