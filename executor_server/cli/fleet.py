"""`executor-server fleet`: the certificates by which the front and the nodes of a fleet know each other."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from executor_server.cli.shared import EXIT_PLACE, fail
from executor_server.fleet import (
    DAYS,
    MAX_DAYS,
    CertificateError,
    Issued,
    authority_expire_time,
    issue_front,
    issue_node,
)

_DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
_VALID_DAYS = click.option(
    "--days",
    type=click.IntRange(1, MAX_DAYS),
    default=DAYS,
    show_default=True,
    help="Days for which the certificates are valid, at most until the authority's end.",
)


@click.group()
def fleet() -> None:
    """Makes the certificates of a fleet."""


@fleet.command()
@_DIRECTORY
@_VALID_DAYS
def init(directory: Path, days: int) -> None:
    """Makes the authority of a fleet in DIR, and the certificate of its front; run again, renews the latter."""
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
    """Makes the certificates of nodes; run again, renews them."""
    for node in nodes:
        try:
            _show(issue_node(directory, node, days))
        except CertificateError as error:
            fail(EXIT_PLACE, str(error))


def _show(issued: Issued) -> None:
    left = issued.expire_time - datetime.now(UTC) + timedelta(minutes=1)
    click.echo(
        f"{issued.folder}: the certificate of {issued.member.text}, valid until {issued.expire_time:%Y-%m-%d} "
        f"({left.days:,} days)"
    )
