"""`executor-server audit`: verifies that the audit log is whole, and shows its records.

Both commands read files that an attacker may have written; they print only printable ASCII. Exit code of its own: 5
when the log is not whole.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from executor_server.daemon.cli.shared import EXIT_PLACE, fail, load_config, placed, span_of
from executor_server.policy.audit import (
    AuditKind,
    Finding,
    Position,
    as_ascii,
    file_numbers,
    file_path,
    read_fields,
    read_lines,
    verify,
)

EXIT_BROKEN = 5
MAX_SHOWN_CHARS = 160
"""Characters of a record's details in a line for people."""

_POSITION = re.compile(r"([1-9][0-9]{0,18}):([0-9a-f]{64})")
# Fields with a column of their own, and fields of no interest to people.
_NOT_DETAILS = frozenset(("seq", "prev", "hash", "time", "kind", "tenant", "session", "policy"))


@click.group()
def audit() -> None:
    """Verifies and shows the audit log."""


def _position(_context: click.Context, _option: click.Parameter, value: str | None) -> Position | None:
    if value is None:
        return None
    match = _POSITION.fullmatch(value)
    if match is None:
        raise click.BadParameter("must be SEQ:HASH, as `audit verify` prints it")
    return Position(int(match[1]), match[2])


def _moment(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    """Converts a time to the form that records have, which sorts as times do."""
    if value is None:
        return None
    try:
        span = span_of(value)
        if span is not None:
            moment = datetime.now(UTC) - span
        else:
            moment = datetime.fromisoformat(value)
            moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter("must be like 30m, 2h or 7d ago, or like 2026-01-31T12:00 (UTC)") from None
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# ---------------------------------------------------------------------------------------------------------------------
# verify


@audit.command("verify")
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--expect",
    "expected",
    metavar="SEQ:HASH",
    callback=_position,
    help="A record known to be in the log, from an earlier `audit verify` or from elsewhere.",
)
@placed
def verify_log(directory: Path | None, expected: Position | None, **options: Any) -> None:
    """Detects changed, removed, added or moved records in the log in DIRECTORY (default: the daemon's)."""
    place = directory or load_config(**options).audit_directory
    try:
        verdict = verify(place, expected)
    except OSError as error:
        fail(EXIT_PLACE, f"The audit log in {place} can't be read: {error.strerror}.")
    if not verdict.files:
        fail(EXIT_BROKEN, f"There is no audit log in {place}.")
    for note in verdict.notes:
        click.echo(f"note: {_safe(note)}")
    for problem in verdict.problems:
        click.echo(_safe(problem), err=True)
    if verdict.more:
        click.echo(f"... and {verdict.more} more", err=True)
    size = f"records: {verdict.records}, files: {verdict.files}"
    if not verdict.whole:
        fail(EXIT_BROKEN, f"The log is NOT whole ({size}).")
    click.echo(f"The log is whole ({size}).")
    click.echo(f"Its last record is {verdict.last.seq}:{verdict.last.hash}")


def _safe(finding: Finding) -> str:
    return as_ascii(str(finding))[1:-1]


# ---------------------------------------------------------------------------------------------------------------------
# show


@dataclass(frozen=True)
class _Filter:
    """The filter of `audit show`; None admits every value."""

    tenant: str | None
    session: str | None
    kinds: tuple[str, ...]
    since: str | None
    until: str | None

    def admits(self, record: dict[str, Any]) -> bool:
        time = str(record.get("time"))
        return (
            (self.tenant is None or record.get("tenant") == self.tenant)
            and (self.session is None or str(record.get("session", "")).startswith(self.session))
            and (not self.kinds or record.get("kind") in self.kinds)
            and (self.since is None or time >= self.since)
            and (self.until is None or time <= self.until)
        )


@audit.command("show")
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--tenant", help="Only of this tenant.")
@click.option("--session", help="Only of this session; the beginning of its id is enough.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice([kind.value for kind in AuditKind]), metavar="KIND")
@click.option("--since", metavar="TIME", callback=_moment, help="2h, 7d, or 2026-01-31T12:00 (UTC).")
@click.option("--until", metavar="TIME", callback=_moment, help="The same.")
@click.option("--json", "as_json", is_flag=True, help="Print the records themselves, one per line.")
@click.option("-n", "last", type=click.IntRange(1, 1_000_000), help="Only the last N records.")
@placed
def show_log(
    directory: Path | None,
    tenant: str | None,
    session: str | None,
    kinds: tuple[str, ...],
    since: str | None,
    until: str | None,
    as_json: bool,
    last: int | None,
    **options: Any,
) -> None:
    """Shows the records of the log in DIRECTORY (default: the daemon's). `audit verify` checks them."""
    place = directory or load_config(**options).audit_directory
    wanted = _Filter(tenant, session, kinds, since, until)
    try:
        lines: Iterable[str] = _matching(place, wanted, as_json=as_json)
        for line in deque(lines, maxlen=last) if last is not None else lines:
            click.echo(line)
    except OSError as error:
        fail(EXIT_PLACE, f"The audit log in {place} can't be read: {error.strerror}.")


def _matching(directory: Path, wanted: _Filter, *, as_json: bool) -> Iterator[str]:
    for number in file_numbers(directory):
        for line in read_lines(file_path(directory, number)):
            record = read_fields(line)
            if record is None:
                click.echo(f"{file_path(directory, number).name}: a line is no record", err=True)
            elif wanted.admits(record):
                yield as_ascii(record) if as_json else _row(record)


def _row(record: dict[str, Any]) -> str:
    """Formats a record for people: number, time, kind, tenant, session and details."""
    details = " ".join(
        f"{as_ascii(key).strip(chr(34))}={as_ascii(value).strip(chr(34))}"
        for key, value in record.items()
        if key not in _NOT_DETAILS
    )
    columns = (
        _plain(record.get("seq"), 7),
        _plain(record.get("time"), 27),
        f"{_plain(record.get('kind'), 32):<19}",
        f"{_plain(record.get('tenant'), 64):<10}",
        f"{_plain(record.get('session'), 8):<8}",
        details if len(details) <= MAX_SHOWN_CHARS else details[:MAX_SHOWN_CHARS] + "...",
    )
    return " ".join(columns).rstrip()


def _plain(value: object, chars: int) -> str:
    return "-" if value is None else as_ascii(value).strip('"')[:chars]
