"""The registry: a row is read back as it was written, or not at all."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.core import keep_checksums
from executor_server.core.config.state_dir import StateDir, StateDirError
from executor_server.core.model import (
    AuditRules,
    ExecutionLimits,
    FileRules,
    Limits,
    PolicyRef,
    Principal,
    SandboxSpec,
    SessionSpec,
    ToolRules,
)
from executor_server.core.network import NetworkRules, NetworkSecret, NetworkUsage
from executor_server.sessions.journal.registry import Registry, RegistryError, SessionRecord, SessionUse
from tests.support.full_disk import allow_changes, forbid_changes
from tests.support.rounds import rounds

SPEC = SessionSpec(
    SandboxSpec("base", 2**28, 16, 2**24, 60.0, cpus=1.5, may_pull=True, backends=("docker", "e2b")),
    Limits(1.0, 2.5, 1000, 2**28, 16, 1000, 2**24, 600.0, 3600.0, 10**9),
    ExecutionLimits(0.5, 2.5, 500, 1000),
    ExecutionLimits(1.0, 2.5, 1000, 1000),
    ("math", "numpy.*"),
    "x = 'é\N{SNOWMAN}'\n",
    PolicyRef("data", "7", "f" * 16),
    denied_imports=("os",),
    refused_language=("open",),
    tools=ToolRules((), ("a*",)),
    files=FileRules(1, 2, 3, None),
    audit=AuditRules("full", True),
    network=NetworkRules(("a.example:443",), ("b.example",), (NetworkSecret("a.example", "X-Key", "${a}", ("GET",)),)),
    labels={"a": "b"},
)
RECORD = SessionRecord(
    "s1", Principal("tenant", "name"), "r1", SPEC, "local", "sandbox", bytes(range(32)), "3.11.2", True, 1.5, 1
)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = Registry(StateDir(tmp_path))
    yield registry
    registry.close()


def change(directory: Path, statement: str, *values: object) -> None:
    """Changes the sessions of the file as a daemon does, so that their checksums fit."""
    with closing(sqlite3.connect(directory / "registry.db", isolation_level=None)) as database:
        columns = [column[1] for column in database.execute("PRAGMA table_info(sessions)")]
        keep_checksums(database, "sessions", columns[:-1], columns[:1])
        database.execute(statement, values)


def reopened(registry: Registry, directory: Path) -> list[SessionRecord]:
    """Opens it as the next daemon does, after a kill that closed nothing."""
    after = Registry(StateDir(directory))
    records = after.load()
    after.close()
    return records


def test_what_was_written_is_read_back_as_it_was(registry: Registry, tmp_path: Path) -> None:
    second = replace(RECORD, session_id="s0", create_time_s=2.0, warm=False, last_used_s=3.0)
    registry.add(second)
    registry.add(RECORD)
    assert reopened(registry, tmp_path) == [RECORD, second], "the oldest first"


def test_a_session_of_before_backends_had_an_order_is_read_as_one_without(registry: Registry, tmp_path: Path) -> None:
    registry.add(RECORD)
    change(tmp_path, "UPDATE sessions SET spec = json_remove(spec, '$.sandbox.backends')")
    (found,) = reopened(registry, tmp_path)
    assert found.spec == replace(SPEC, sandbox=replace(SPEC.sandbox, backends=()))


def test_what_is_noted_later_is_read_too(registry: Registry, tmp_path: Path) -> None:
    registry.add(RECORD)
    registry.note_connections("s1", 7)
    registry.note_use([SessionUse("s1", 9.5, 4, 2, 3), SessionUse("nobody", 1.0, 1, 0, 0)])
    used = NetworkUsage(1, 2, 2**40, 4)
    registry.note_network({"s1": used, "nobody": used})
    registry.note_lost("s1", "it caught fire")
    expected = replace(
        RECORD, connections=7, last_used_s=9.5, generation=4, puts=2, gets=3, network=used, lost_reason="it caught fire"
    )
    assert reopened(registry, tmp_path) == [expected]


def test_what_is_forgotten_goes_with_its_journal(registry: Registry, tmp_path: Path) -> None:
    registry.add(RECORD)
    segments = registry.segments_of("s1")
    segments.create()
    segments.begin_segment(b"{}")
    segments.close()
    registry.forget("s1")
    assert [path.name for path in (tmp_path / "journals").iterdir()] == ["s1"]
    registry.remove_journals()
    assert list((tmp_path / "journals").iterdir()) == []
    assert reopened(registry, tmp_path) == []


def test_a_journal_that_a_killed_daemon_had_no_time_to_remove_is_removed_by_the_next(
    registry: Registry, tmp_path: Path
) -> None:
    registry.add(RECORD)
    (tmp_path / "journals" / "s1").mkdir()
    registry.forget("s1")
    assert reopened(registry, tmp_path) == []
    assert list((tmp_path / "journals").iterdir()) == []


def test_what_can_not_be_written_is_said_at_creation_and_made_up_for_at_the_end(
    registry: Registry, tmp_path: Path
) -> None:
    registry.add(RECORD)
    forbid_changes(tmp_path / "registry.db")
    with pytest.raises(RegistryError):
        registry.add(replace(RECORD, session_id="s2"))
    registry.note_connections("s1", 7)
    registry.forget("s1")
    assert [record.session_id for record in registry.load()] == ["s1"]
    allow_changes(tmp_path / "registry.db")
    registry.note_use([])
    assert registry.load() == []


def made_of(tmp_path: Path, count: int) -> list[SessionRecord]:
    """Makes a registry that was closed in order, so that all of it is in one file; each session has a journal."""
    registry = Registry(StateDir(tmp_path))
    records = [replace(RECORD, session_id=f"s{number:02}", create_time_s=float(number)) for number in range(count)]
    for record in records:
        registry.add(record)
        (tmp_path / "journals" / record.session_id).mkdir()
    registry.close()
    return records


@pytest.mark.parametrize("harm", ["no database", "half of it"])
def test_a_harmed_file_is_put_aside_and_what_fits_goes_on(tmp_path: Path, harm: str) -> None:
    records = made_of(tmp_path, 50)
    path = tmp_path / "registry.db"
    whole = path.read_bytes()
    harmed = {"no database": b"not a database, but long enough to be one" * 100, "half of it": whole[: len(whole) // 2]}
    path.write_bytes(harmed[harm])
    registry = Registry(StateDir(tmp_path))
    found = registry.load()
    assert all(record in records for record in found)
    assert set(registry.rejected) == {each.session_id for each in records} - {each.session_id for each in found}
    assert "damaged" in registry.rejected["s49"]
    (aside,) = (each for each in tmp_path.glob("registry.db.damaged-*") if each.suffix.lstrip(".").count("-") == 1)
    assert stat.S_IMODE(aside.stat().st_mode) == 0o600
    registry.add(replace(RECORD, session_id="new"))
    registry.close()
    after = Registry(StateDir(tmp_path))
    assert [record.session_id for record in after.load()][-1:] == ["new"] or not found
    assert after.rejected == {}
    after.close()


def test_a_file_that_can_not_be_opened_stops_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    """A locked file does not mean a damaged one."""
    (tmp_path / "registry.db").mkdir()
    with pytest.raises(StateDirError, match=r"registry\.db.*move it away"):
        Registry(StateDir(tmp_path))


def test_bytes_of_the_file_changed_anywhere_are_told_or_changes_nothing(tmp_path: Path) -> None:
    """SQLite notices a broken page, but not a changed name or limit."""
    made = tmp_path / "made"
    made.mkdir()
    records = made_of(made, 2)
    whole = (made / "registry.db").read_bytes()
    used = [position for position in range(len(whole)) if whole[position]][:: rounds(11, 211)]
    wrong, noticed = [], 0
    for position in used:
        directory = tmp_path / "damaged"
        (directory / "journals").mkdir(parents=True)
        for record in records:
            (directory / "journals" / record.session_id).mkdir()
        harmed = bytearray(whole)
        harmed[position] ^= 0x01
        (directory / "registry.db").write_bytes(harmed)
        try:
            registry = Registry(StateDir(directory))
            found = registry.load()
            missing = {each.session_id for each in records if each not in found}
            if any(record not in records for record in found) or not missing <= registry.rejected.keys():
                wrong.append(position)
            noticed += bool(missing)
            registry.close()
        except StateDirError:
            noticed += 1
        shutil.rmtree(directory)
    assert wrong == []
    assert noticed > len(used) // 2


def test_a_row_that_was_changed_past_us_is_not_changed_by_us(registry: Registry, tmp_path: Path) -> None:
    """A new checksum would fit the damaged row, which would then be believed."""
    registry.add(RECORD)
    with sqlite3.connect(tmp_path / "registry.db") as database:
        database.execute("UPDATE sessions SET tenant = 'another'")
    database.close()
    registry.note_connections("s1", 7)
    assert registry.load() == []
    assert list(registry.rejected) == ["s1"]


@pytest.mark.parametrize("version", [1, 99])
def test_another_version_that_names_sessions_stops_the_start(registry: Registry, tmp_path: Path, version: int) -> None:
    registry.add(RECORD)
    change(tmp_path, f"PRAGMA user_version = {version}")
    with pytest.raises(StateDirError, match=rf"version {version} and names sessions.*reads version \d"):
        Registry(StateDir(tmp_path))


@pytest.mark.parametrize("version", [1, 99])
def test_an_empty_registry_of_another_version_is_replaced(registry: Registry, tmp_path: Path, version: int) -> None:
    """A daemon that was stopped with SIGTERM, which the advice asks for, leaves it."""
    registry.add(RECORD)
    registry.forget("s1")
    registry.close()
    change(tmp_path, f"PRAGMA user_version = {version}")
    change(tmp_path, "ALTER TABLE sessions ADD COLUMN later TEXT")
    after = Registry(StateDir(tmp_path))
    after.add(RECORD)
    assert reopened(after, tmp_path) == [RECORD]
    after.close()


def test_a_row_with_a_field_of_another_version_is_not_said_to_be_damaged(registry: Registry, tmp_path: Path) -> None:
    registry.add(RECORD)
    registry.close()
    change(tmp_path, "UPDATE sessions SET spec = json_insert(spec, '$.later', true)")
    (tmp_path / "journals" / "s1").mkdir()
    after = Registry(StateDir(tmp_path))
    assert after.load() == []
    assert "another version" in after.rejected["s1"]
    after.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("spec", "{"),
        ("spec", "[]"),
        ("spec", '{"sandbox": {}}'),
        ("spec", '{"sandbox": {"image": 1}, "limits": {}, "authorized_imports": []}'),
        ("spec", "REPLACED"),
    ],
)
def test_a_row_that_is_not_ours_is_not_believed_and_others_are(
    registry: Registry, tmp_path: Path, column: str, value: str
) -> None:
    registry.add(RECORD)
    if value == "REPLACED":
        change(tmp_path, "UPDATE sessions SET spec = replace(spec, '\"image\"', '\"imago\"')")
    else:
        change(tmp_path, f"UPDATE sessions SET {column} = ?", value)
    other = replace(RECORD, session_id="s2")
    registry.add(other)
    assert registry.load() == [other]
    assert list(registry.rejected) == ["s1"]
    assert reopened(registry, tmp_path) == [other]


def test_a_changed_holder_is_not_believed(tmp_path: Path) -> None:
    """A changed lease id, which no client renews, would end the session of a living client."""
    state_dir = StateDir(tmp_path)
    registry = Registry(state_dir)
    registry.add(RECORD, "a" * 32)
    registry.note_holder("s1", "b" * 32)
    registry.close()
    with sqlite3.connect(state_dir.registry_path) as database:
        database.execute("UPDATE holders SET lease_id = ? WHERE lease_id = ?", ("c" * 32, "b" * 32))
    database.close()
    registry = Registry(state_dir)
    assert registry.holders() == {"s1": ["a" * 32]}
    assert registry.holders() == {"s1": ["a" * 32]}, "it is removed"
    registry.close()
