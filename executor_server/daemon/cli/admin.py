"""`executor-server admin`: the calls of AdminService, for people and, with --json, for scripts.

Calls a running daemon, on this machine or elsewhere; without options the one of this user's state directory. Exit codes
in addition to those of the other commands: 1 the daemon refused, or could not be reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from executor_server.daemon.cli.calling import asked, number_of, print_json, reached, time_of
from executor_server.daemon.cli.shared import print_table, printable

_TENANT = click.option("--tenant", default="", help="Only of this tenant.")
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
    """Lists and ends sessions of all tenants, cancels executions, drains, reloads, and shows usage."""


@admin.command("sessions")
@_TENANT
@reached
def list_sessions(tenant: str, as_json: bool, **access: Any) -> None:
    """Lists the sessions of all tenants, oldest first."""
    answer = asked(access, lambda client: client.sessions(tenant))
    if as_json:
        print_json(answer)
        return
    rows = [
        ("SESSION", "TENANT", "PRINCIPAL", "STATE", "IMAGE", "BACKEND", "PROFILE", "CREATED", "EXPIRES", "PACKAGES")
    ]
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
                time_of(session, "create_time"),
                time_of(session, "expire_time"),
                ", ".join(session.get("packages", ())) or "-",
            )
        )
    print_table(rows)


@admin.command()
@click.argument("session_id", metavar="SESSION")
@reached
def kill(session_id: str, as_json: bool, **access: Any) -> None:
    """Ends a session of any tenant, and waits until its sandbox is destroyed."""
    answer = asked(access, lambda client: client.kill(session_id))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"Session {printable(session_id)} has ended.")


@admin.command()
@click.argument("session_id", metavar="SESSION")
@click.argument("execution_id", metavar="EXECUTION")
@reached
def stop(session_id: str, execution_id: str, as_json: bool, **access: Any) -> None:
    """Cancels an EXECUTION in a session of any tenant; the session continues."""
    answer = asked(access, lambda client: client.stop(session_id, execution_id))
    if as_json:
        print_json(answer)
    else:
        click.echo(f"Execution {printable(execution_id)} is being cancelled.")


@admin.command()
@click.argument("session_id", metavar="SESSION")
@reached
def egress(session_id: str, as_json: bool, **access: Any) -> None:
    """Shows a session's allowed hosts, open connections and last refusals, for any tenant."""
    answer = asked(access, lambda client: client.network(session_id))
    if as_json:
        print_json(answer)
    else:
        _print_network(answer)


_NODE = click.argument("node", metavar="[NODE]", default="")


@admin.command()
@_NODE
@click.option("--move", is_flag=True, help="Move the node's idle sessions to others, with variables and files.")
@reached
def drain(node: str, move: bool, as_json: bool, **access: Any) -> None:
    """Stops the daemon from accepting new sessions; existing sessions continue. Through a front: the NODE."""
    if move and not node:
        raise click.UsageError("--move needs a NODE: its sessions are moved")
    _drain(access, as_json=as_json, resume=False, node=node, move=move)


@admin.command()
@_NODE
@reached
def resume(node: str, as_json: bool, **access: Any) -> None:
    """Lets a drained daemon accept new sessions again. Through a front: the NODE."""
    _drain(access, as_json=as_json, resume=True, node=node, move=False)


def _drain(access: Mapping[str, Any], *, as_json: bool, resume: bool, node: str, move: bool) -> None:
    answer = asked(access, lambda client: client.drain(resume=resume, node=node, move=move))
    if as_json:
        print_json(answer)
        return
    who = f"The node {node}" if node else "The daemon"
    taking = "takes no new sessions" if answer["draining"] else "takes new sessions"
    are = "were" if move else "are"  # counted before they were moved
    click.echo(f"{who} {taking}. There {are} {answer['sessions']}, of which {answer['busy']} {are} busy.")
    for each in answer["moved"]:
        where = f"was moved to {each['new_session_id']}" if each["new_session_id"] else "was not moved"
        problem = f": {each['problem']}" if each["problem"] else ""
        click.echo(printable(f"Session {each['session_id']} {where}{problem}"))


@admin.command()
@reached
def reload(as_json: bool, **access: Any) -> None:
    """Reloads the policy file and the tokens."""
    answer = asked(access, lambda client: client.reload())
    if as_json:
        print_json(answer)
        return
    verb = "is now" if answer["changed"] else "is as before:"
    click.echo(
        f"The policy {verb} version {printable(answer['version'])}, fingerprint {printable(answer['fingerprint'])}."
    )


@admin.command()
@_TENANT
@reached
def usage(tenant: str, as_json: bool, **access: Any) -> None:
    """Shows the usage and the quotas of tenants."""
    answer = asked(access, lambda client: client.usage(tenant))
    if as_json:
        print_json(answer)
        return
    rows = [("TENANT", "PROFILE", *(name.upper().replace("_", " ") for name in _USED))]
    for each in answer["tenants"]:
        used = (_used(each[field], each.get("quotas", {}).get(quota)) for quota, field in _USED.items())
        rows.append((each["tenant"], each["profile"], *used))
    print_table(rows)


def _print_network(answer: Mapping[str, Any]) -> None:
    if (rules := answer.get("rules")) is None:
        click.echo("The session has no network.")
        return
    usage = answer.get("usage", {})
    used = {name: number_of(usage.get(name, 0)) for name in ("connections", "denied", "sent_bytes", "received_bytes")}
    exhausted = "yes: the tenant's quota egress_bytes_per_hour is spent" if answer["exhausted"] else "no"
    print_table(
        [
            ("allowed", ", ".join(rules["allowed_hosts"])),
            ("denied", ", ".join(rules["denied_hosts"]) or "-"),
            ("secrets", ", ".join(f"{each['header']} for {each['host']}" for each in rules["secrets"]) or "-"),
            ("connections made", used["connections"]),
            ("refused", used["denied"]),
            ("bytes sent", f"{used['sent_bytes']} of {number_of(rules['max_sent_bytes'])}"),
            ("bytes received", f"{used['received_bytes']} of {number_of(rules['max_received_bytes'])}"),
            ("closed by a quota", exhausted),
        ]
    )
    if answer["connections"]:
        click.echo()
        opened = [("OPEN", "ADDRESS", "ALLOWED BY", "EXECUTION", "SINCE")]
        for each in answer["connections"]:
            execution = each["execution_id"] or "-"
            opened.append((_host(each), each["address"] or "-", each["rule"], execution, time_of(each, "open_time")))
        print_table(opened)
    if answer["denials"]:
        click.echo()
        refused = [("REFUSED", "ADDRESS", "REASON", "AT")]
        refused += [
            (_host(each), each["address"] or "-", each["reason"], time_of(each, "time")) for each in answer["denials"]
        ]
        print_table(refused)


def _host(place: Mapping[str, Any]) -> str:
    return f"{place['host']}:{place['port']}" if place["port"] else place["host"]


def _used(used: float | str, quota: float | str | None) -> str:
    """Formats the use of a quota; JSON has 64-bit numbers as text."""
    return number_of(used) if quota is None else f"{number_of(used)} of {number_of(quota)}"
