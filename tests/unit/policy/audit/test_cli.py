"""`executor-server audit` verifies a log, and shows its records without trusting them."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from executor_server.daemon.cli import main
from executor_server.daemon.cli.audit import EXIT_BROKEN
from executor_server.daemon.cli.shared import EXIT_PLACE
from executor_server.policy.audit.chain import AuditKind
from tests.support.audit import audit_log, paths, records
from tests.support.fork_server import server

BROKEN = b'\x1b]0;owned\x07{"seq":3,\xff\xff\n'


def run(*arguments: object) -> Result:
    return CliRunner(catch_exceptions=False).invoke(main, ["audit", *map(str, arguments)])


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    directory = tmp_path / "audit"
    async with audit_log(directory) as written:
        for tenant, session in (("acme", "a" * 32), ("umbrella", "b" * 32)):
            fields = {"tenant": tenant, "session": session, "policy": "f" * 16}
            written.write(AuditKind.SESSION_ENDED, {**fields, "reason": "it\x1b[31m\nwas deleted\u202e"})
            written.write(AuditKind.FILE_GOT, {**fields, "path": "x.csv", "bytes": 12})
    return directory


def shown(*arguments: object) -> list[str]:
    result = run("show", *arguments)
    assert result.exit_code == 0
    return result.stdout.splitlines()


def test_a_whole_log_is_called_whole_and_its_end_is_told(log: Path) -> None:
    last = records(log)[-1]
    result = run("verify", log)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "The log is whole (records: 4, files: 1).",
        f"Its last record is 4:{last['hash']}",
    ]


def test_the_end_of_an_earlier_verification_can_be_asked_for(log: Path) -> None:
    known = run("verify", log).stdout.split()[-1]
    assert run("verify", log, "--expect", known).exit_code == 0
    assert run("verify", log, "--expect", "4:" + "0" * 64).exit_code == EXIT_BROKEN


def test_a_changed_log_is_named_by_file_line_and_record(log: Path) -> None:
    (path,) = paths(log)
    path.write_bytes(path.read_bytes().replace(b"umbrella", b"umbrelle", 1))
    result = run("verify", log)
    assert result.exit_code == EXIT_BROKEN
    assert "audit-000001.jsonl:3: record 3 was changed" in result.stderr


def test_the_log_is_found_by_the_configuration(log: Path, tmp_path: Path) -> None:
    assert run("verify", "--state-dir", tmp_path).exit_code == 0
    config = tmp_path / "c.toml"
    config.write_text(f'[audit]\ndirectory = "{log}"\n')
    assert run("verify", "--config", config).exit_code == 0


def test_no_log_is_not_a_whole_log(tmp_path: Path) -> None:
    assert run("verify", tmp_path).exit_code == EXIT_BROKEN
    assert run("verify", tmp_path / "none").exit_code == EXIT_PLACE


def test_records_are_shown_for_people_a_line_each(log: Path) -> None:
    lines = shown(log)
    assert len(lines) == 4
    assert lines[1].split()[2:] == ["file_got", "acme", "aaaaaaaa", "path=x.csv", "bytes=12"]


@pytest.mark.parametrize(
    ("options", "seqs"),
    [
        (("--tenant", "acme"), [1, 2]),
        (("--session", "bbb"), [3, 4]),
        (("--kind", "file_got"), [2, 4]),
        (("--kind", "file_got", "--tenant", "umbrella"), [4]),
        (("-n", "1"), [4]),
        (("--since", "1h"), [1, 2, 3, 4]),
        (("--until", "1h"), []),
        (("--since", (datetime.now(UTC) - timedelta(days=1)).isoformat()), [1, 2, 3, 4]),
        (("--until", "2020-01-01"), []),
    ],
)
def test_records_can_be_chosen(log: Path, options: tuple[str, ...], seqs: list[int]) -> None:
    assert [json.loads(line)["seq"] for line in shown(log, "--json", *options)] == seqs


@pytest.mark.parametrize("moment", ["yesterday", "-1h", "99999999w", "2026-13-01"])
def test_a_time_that_is_none_is_wrong_usage(log: Path, moment: str) -> None:
    assert run("show", log, "--since", moment).exit_code == 2


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_whatever_is_in_a_log_only_printable_ascii_is_shown(log: Path, options: tuple[str, ...]) -> None:
    (path,) = paths(log)
    hostile = json.dumps(
        {"kind": "\x1b[2J\x7f", "tenant": ["\u202e"], "\x1b[31m": {"deep": ["\x07"]}}, ensure_ascii=False
    )
    path.write_bytes(path.read_bytes() + BROKEN + hostile.encode() + b"\n" + b"[" * 10**5 + b"\n")
    result = run("show", log, *options)
    assert result.exit_code == 0
    assert all(character == "\n" or " " <= character <= "~" for character in result.output)


def test_what_is_said_of_a_hostile_log_is_printable_ascii(log: Path) -> None:
    (path,) = paths(log)
    path.write_bytes(path.read_bytes() + BROKEN)
    result = run("verify", log)
    assert result.exit_code == EXIT_BROKEN
    assert all(character == "\n" or " " <= character <= "~" for character in result.output)


def test_a_daemon_whose_log_can_not_be_opened_does_not_start_and_says_why(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    config = tmp_path / "c.toml"
    config.write_text(f'[audit]\ndirectory = "{place}"\n')
    with tempfile.TemporaryDirectory(prefix="s-") as short:  # the socket's path has at most 107 bytes
        started = server("serve", "--config", str(config), "--state-dir", short)
    assert started.returncode == EXIT_PLACE
    assert started.stderr.splitlines()[-1].startswith(f"The audit log in {place} can't be opened: File exists.")
