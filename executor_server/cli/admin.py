"""`executor-server admin`: the calls of AdminService, for people and, with --json, for scripts.

Calls a running daemon, on this machine or elsewhere; without options the one of this user's state directory. Exit codes
besides those of the other commands: 1 the daemon refused, or could not be reached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor_server.cli.shared import EXIT_PLACE, fail, print_table, printable
from executor_server.config import StateDir, StateDirError, default_state_dir, read_token

if TYPE_CHECKING:
    from executor_server.rpc import AdminClient, AdminEndpoint

EXIT_REFUSED = 1

_FILE = click.Path(path_type=Path, dir_okay=False)
_TENANT = click.option("--tenant", default="", help="Of this tenant only.")
# Names of quotas, and of the fields of GetUsage that hold their use.
_USED = {
    "sessions": "sessions",
    "executions": "executions",
    "creations_per_minute": "creations_in_last_minute",
    "cpu_time_s_per_hour": "cpu_time_s_in_last_hour",
    "output_bytes_per_hour": "output_bytes_in_last_hour",
    "egress_bytes_per_hour": "egress_bytes_in_last_hour",
    "calls": "calls",
}


@click.group()
def admin() -> None:
    """Lists and ends sessions of all tenants, drains, reloads, and shows what is used."""


def _reached(command: Callable[..., None]) -> Callable[..., None]:
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
            help="Of an admin; better in $EXECUTOR_TOKEN, which others can't see. Default: the state directory's, "
            "for a daemon of ours on this machine.",
        ),
        click.option("--tls", is_flag=True, help="Use TLS; implied by those below."),
        click.option("--tls-ca", type=_FILE, help="Whom to trust. Default: the public authorities."),
        click.option("--tls-cert", type=_FILE, help="Our own certificate, and"),
        click.option("--tls-key", type=_FILE, help="its key; a token may not be needed then."),
        click.option(
            "--state-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Default: $EXECUTOR_STATE_DIR, else ~/.local/state/remote-executor.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print the daemon's answer as JSON."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@admin.command("sessions")
@_TENANT
@_reached
def list_sessions(tenant: str, as_json: bool, **access: Any) -> None:
    """Lists the sessions of all tenants, oldest first."""
    answer = _asked(access, lambda client: client.sessions(tenant))
    if as_json:
        _print_json(answer)
        return
    rows = [("SESSION", "TENANT", "PRINCIPAL", "STATE", "IMAGE", "BACKEND", "PROFILE", "CREATED", "EXPIRES")]
    for owned in answer["sessions"]:
        session = owned["session"]
        rows.append(
            (
                session["session_id"],
                owned["tenant"],
                owned["principal"],
                session["state"].removeprefix("SESSION_STATE_").lower(),
                session["image"],
                session.get("backend", ""),
                session.get("policy", {}).get("profile", ""),
                _time(session, "create_time"),
                _time(session, "expire_time"),
            )
        )
    print_table(rows)


@admin.command()
@click.argument("session_id", metavar="SESSION")
@_reached
def kill(session_id: str, as_json: bool, **access: Any) -> None:
    """Ends a session of any tenant; returns when its sandbox is destroyed."""
    answer = _asked(access, lambda client: client.kill(session_id))
    if as_json:
        _print_json(answer)
    else:
        click.echo(f"Session {printable(session_id)} has ended.")


@admin.command()
@click.argument("session_id", metavar="SESSION")
@_reached
def egress(session_id: str, as_json: bool, **access: Any) -> None:
    """Shows what a session of any tenant may reach, what it has open, and what it was refused last."""
    answer = _asked(access, lambda client: client.network(session_id))
    if as_json:
        _print_json(answer)
    else:
        _print_network(answer)


@admin.command()
@_reached
def drain(as_json: bool, **access: Any) -> None:
    """Has the daemon take no new sessions; existing sessions go on."""
    _drain(access, as_json=as_json, resume=False)


@admin.command()
@_reached
def resume(as_json: bool, **access: Any) -> None:
    """Has a drained daemon take new sessions again."""
    _drain(access, as_json=as_json, resume=True)


def _drain(access: Mapping[str, Any], *, as_json: bool, resume: bool) -> None:
    answer = _asked(access, lambda client: client.drain(resume=resume))
    if as_json:
        _print_json(answer)
        return
    taking = "takes no new sessions" if answer["draining"] else "takes new sessions"
    click.echo(f"The daemon {taking}. There are {answer['sessions']}, of which {answer['busy']} are busy.")


@admin.command()
@_reached
def reload(as_json: bool, **access: Any) -> None:
    """Has the daemon read the policy file and the tokens again."""
    answer = _asked(access, lambda client: client.reload())
    if as_json:
        _print_json(answer)
        return
    verb = "is now" if answer["changed"] else "is as before:"
    click.echo(
        f"The policy {verb} version {printable(answer['version'])}, fingerprint {printable(answer['fingerprint'])}."
    )


@admin.command()
@_TENANT
@_reached
def usage(tenant: str, as_json: bool, **access: Any) -> None:
    """Shows what tenants have and have used, and their quotas."""
    answer = _asked(access, lambda client: client.usage(tenant))
    if as_json:
        _print_json(answer)
        return
    rows = [("TENANT", "PROFILE", *(name.upper().replace("_", " ") for name in _USED))]
    for each in answer["tenants"]:
        used = (_used(each[field], each.get("quotas", {}).get(quota)) for quota, field in _USED.items())
        rows.append((each["tenant"], each["profile"], *used))
    print_table(rows)


# ---------------------------------------------------------------------------------------------------------------------
# Calling


def _asked(access: Mapping[str, Any], ask: Callable[[AdminClient], dict[str, Any]]) -> dict[str, Any]:
    """Returns the daemon's answer. Ends the process with a sentence when there is none, or when it is a refusal."""
    # Imported here: the other commands don't need gRPC.
    from executor_server.rpc import AdminError, admin_client

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
    from executor_server.rpc import AdminEndpoint, is_own

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


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def _print_network(answer: Mapping[str, Any]) -> None:
    if (rules := answer.get("rules")) is None:
        click.echo("The session has no network.")
        return
    usage = answer.get("usage", {})
    used = {name: _number(usage.get(name, 0)) for name in ("connections", "denied", "sent_bytes", "received_bytes")}
    exhausted = "yes: the tenant's quota egress_bytes_per_hour is spent" if answer["exhausted"] else "no"
    print_table(
        [
            ("allowed", ", ".join(rules["allowed_hosts"])),
            ("denied", ", ".join(rules["denied_hosts"]) or "-"),
            ("secrets", ", ".join(f"{each['header']} for {each['host']}" for each in rules["secrets"]) or "-"),
            ("connections made", used["connections"]),
            ("refused", used["denied"]),
            ("bytes sent", f"{used['sent_bytes']} of {_number(rules['max_sent_bytes'])}"),
            ("bytes received", f"{used['received_bytes']} of {_number(rules['max_received_bytes'])}"),
            ("closed by a quota", exhausted),
        ]
    )
    if answer["connections"]:
        click.echo()
        opened = [("OPEN", "ADDRESS", "ALLOWED BY", "EXECUTION", "SINCE")]
        for each in answer["connections"]:
            execution = each["execution_id"] or "-"
            opened.append((_host(each), each["address"] or "-", each["rule"], execution, _time(each, "open_time")))
        print_table(opened)
    if answer["denials"]:
        click.echo()
        refused = [("REFUSED", "ADDRESS", "REASON", "AT")]
        refused += [
            (_host(each), each["address"] or "-", each["reason"], _time(each, "time")) for each in answer["denials"]
        ]
        print_table(refused)


def _host(place: Mapping[str, Any]) -> str:
    return f"{place['host']}:{place['port']}" if place["port"] else place["host"]


def _print_json(answer: Mapping[str, Any]) -> None:
    click.echo(json.dumps(answer, indent=2))


def _used(used: float | str, quota: float | str | None) -> str:
    """Formats the use of a quota; JSON has 64-bit numbers as text."""
    return _number(used) if quota is None else f"{_number(used)} of {_number(quota)}"


def _number(value: float | str) -> str:
    number = float(value)
    return f"{int(number):,}" if number.is_integer() else f"{number:,.1f}"


def _time(session: Mapping[str, Any], name: str) -> str:
    return str(session.get(name, ""))[:16].replace("T", " ")
