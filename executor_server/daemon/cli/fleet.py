"""`executor-server fleet`: the certificates of a fleet's members, and the fleet's state."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from executor_server.daemon.cli.calling import asked, print_json, reached
from executor_server.daemon.cli.shared import EXIT_PLACE, fail, print_table, printable
from executor_server.fleet.membership import (
    DAYS,
    MAX_DAYS,
    CertificateError,
    Issued,
    authority_expire_time,
    issue_front,
    issue_node,
)

# The longest name of a node; with the other columns a line has 80 characters at most.
_NAME_CHARS = 24
_VERSION_CHARS = 8

_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
_VALID_DAYS = click.option(
    "--days",
    type=click.IntRange(1, MAX_DAYS),
    default=DAYS,
    show_default=True,
    help="Validity of the certificates in days, at most until the CA expires.",
)


@click.group()
def fleet() -> None:
    """Creates the certificates of a fleet, and shows its nodes."""


@fleet.command()
@_DIRECTORY
@_VALID_DAYS
def init(directory: Path, days: int) -> None:
    """Creates the CA of a fleet in DIR, and the certificate of its front; a second run renews the latter."""
    try:
        issued = issue_front(directory, days)
        ends = authority_expire_time(directory)
    except CertificateError as error:
        fail(EXIT_PLACE, str(error))
    _show(issued)
    click.echo(f"The authority is valid until {ends:%Y-%m-%d}. Its key is in {directory}, which no member needs.")


@fleet.command()
@_DIRECTORY
@click.argument("nodes", metavar="NODE...", nargs=-1, required=True)
@_VALID_DAYS
def add(directory: Path, nodes: tuple[str, ...], days: int) -> None:
    """Creates the certificates of nodes; a second run renews them."""
    for node in nodes:
        try:
            _show(issue_node(directory, node, days))
        except CertificateError as error:
            fail(EXIT_PLACE, str(error))


@fleet.command()
@reached
def status(as_json: bool, **access: Any) -> None:
    """Shows the nodes of a fleet as its front sees them."""
    answer = asked(access, lambda client: client.fleet())
    if as_json:
        print_json(answer)
        return
    rows: list[tuple[str, ...]] = [("NODE", "STATE", "SESSIONS", "WARM", "LOAD", "LEASE", "VERSION")]
    rows += [_row(node) for node in answer["nodes"]]
    print_table(rows)
    for node in answer["nodes"]:
        if node["problem"]:
            click.echo(f"{_name(node)}: {printable(node['problem'])}")
    waiting = f"; {answer['parked']} requests wait for a place" if answer["parked"] else ""
    click.echo(f"Front {answer['front_id'][:8]}, start {answer['term']}{waiting}.")


def _row(node: Mapping[str, Any]) -> tuple[str, ...]:
    state = node["state"].removeprefix("NODE_STATE_").lower()
    is_known = state not in ("connecting", "refused", "lost")
    making = f"+{node['creating']}" if node["creating"] else ""
    return (
        _name(node),
        state,
        f"{node['sessions']}{making}/{node['max_sessions']}" if is_known else "-",
        str(node["warm"]) if is_known else "-",
        f"{node['load']:.1f}" if is_known else "-",
        f"{node['lease_left_s']:.1f} s" if is_known else "-",
        node["program_version"][:_VERSION_CHARS] or "-",
    )


def _name(node: Mapping[str, Any]) -> str:
    return str(node["node"] or node["link_address"])[:_NAME_CHARS]


def _show(issued: Issued) -> None:
    left = issued.expire_time - datetime.now(UTC) + timedelta(minutes=1)
    click.echo(
        f"{issued.folder}: the certificate of {issued.member.text}, valid until {issued.expire_time:%Y-%m-%d} "
        f"({left.days:,} days)"
    )
