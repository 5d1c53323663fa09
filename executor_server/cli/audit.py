"""`executor-server audit`: whether the audit log is whole, and what is in it.

Both read what may have been written by somebody else. What is shown is printable ASCII, whatever is in the log.
Exit codes of their own: 5 when the log is not whole.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from executor_server.audit_chain import AuditKind, Position, as_ascii, read_fields
from executor_server.audit_directory import file_numbers, file_path, read_lines
from executor_server.audit_verify import Finding, verify
from executor_server.cli.shared import EXIT_PLACE, fail, load_config, placed

EXIT_BROKEN = 5
MAX_SHOWN_CHARS = 160
"""Of the details of a record, in a line for people."""

_SPAN = re.compile(r"([1-9][0-9]{0,8})([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_POSITION = re.compile(r"([1-9][0-9]{0,18}):([0-9a-f]{64})")
# What has a column of its own, or says nothing to people.
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
    """A time in the form that records have, which sorts as times do."""
    if value is None:
        return None
    try:
        span = _SPAN.fullmatch(value)
        if span is not None:
            moment = datetime.now(UTC) - timedelta(**{_UNITS[span[2]]: int(span[1])})
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
    help="A record that is known to have been in the log, from an earlier `audit verify` or from elsewhere.",
)
@placed
def verify_log(directory: Path | None, expected: Position | None, **options: Any) -> None:
    """Finds whatever was changed, removed, added or moved in the log in DIRECTORY (default: the daemon's)."""
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
class _Wanted:
    """Which records are shown; None: all."""

    tenant: str | None
    session: str | None
    kinds: tuple[str, ...]
    since: str | None
    until: str | None

    def has(self, record: dict[str, Any]) -> bool:
        time = str(record.get("time"))
        return (
            (self.tenant is None or record.get("tenant") == self.tenant)
            # Of an id its beginning will do.
            and (self.session is None or str(record.get("session", "")).startswith(self.session))
            and (not self.kinds or record.get("kind") in self.kinds)
            and (self.since is None or time >= self.since)
            and (self.until is None or time <= self.until)
        )


@audit.command("show")
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--tenant", help="Of this tenant only.")
@click.option("--session", help="Of this session only; the beginning of its id will do.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice([kind.value for kind in AuditKind]), metavar="KIND")
@click.option("--since", metavar="TIME", callback=_moment, help="2h, 7d, or 2026-01-31T12:00 (UTC).")
@click.option("--until", metavar="TIME", callback=_moment, help="The same.")
@click.option("--json", "as_json", is_flag=True, help="The records as they are, one a line.")
@click.option("-n", "last", type=click.IntRange(1, 1_000_000), help="The last so many of them.")
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
    """Shows what is in the log in DIRECTORY (default: the daemon's). Whether it is true, `audit verify` says."""
    place = directory or load_config(**options).audit_directory
    wanted = _Wanted(tenant, session, kinds, since, until)
    try:
        lines: Iterable[str] = _shown(place, wanted, as_json=as_json)
        for line in deque(lines, maxlen=last) if last is not None else lines:
            click.echo(line)
    except OSError as error:
        fail(EXIT_PLACE, f"The audit log in {place} can't be read: {error.strerror}.")


def _shown(directory: Path, wanted: _Wanted, *, as_json: bool) -> Iterator[str]:
    for number in file_numbers(directory):
        for line in read_lines(file_path(directory, number)):
            record = read_fields(line)
            if record is None:
                click.echo(f"{file_path(directory, number).name}: a line is no record", err=True)
            elif wanted.has(record):
                yield as_ascii(record) if as_json else _row(record)


def _row(record: dict[str, Any]) -> str:
    """A record for people: when, what, whose, and what else it says."""
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
