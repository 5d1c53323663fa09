"""The front's file remembers what can't be taken back, and is not believed when it is damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from executor_server.core.config import StateDirError
from executor_server.fleet.membership import store as module
from executor_server.fleet.membership.store import FleetStore, StoredNode, Tombstone


def test_each_start_has_a_higher_term_and_the_same_front(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    starts = []
    for _ in range(3):
        store = FleetStore(path)
        starts.append(store.begin())
        store.close()
    assert [start.term for start in starts] == [1, 2, 3]
    assert len({start.front_id for start in starts}) == 1


def test_nodes_and_lost_sessions_are_there_after_a_restart(tmp_path: Path) -> None:
    store = FleetStore(tmp_path / "fleet.db")
    store.write_nodes([StoredNode("n1", "i", 3, 2)], [Tombstone("n1-1", "t", "r", "why", 5.0)])
    store.write_nodes([StoredNode("n1", "i", 4, 3), StoredNode("n2", "j", 1)])
    store.close()
    store = FleetStore(tmp_path / "fleet.db")
    assert store.nodes() == [StoredNode("n1", "i", 4, 3), StoredNode("n2", "j", 1)]
    assert store.tombstones() == [Tombstone("n1-1", "t", "r", "why", 5.0)]
    store.remove_node("n1")
    store.remove_tombstone("n1-1")
    assert [node.node for node in store.nodes()] == ["n2"]
    assert store.tombstones() == []
    store.close()


def test_each_commit_is_synced(tmp_path: Path) -> None:
    store = FleetStore(tmp_path / "fleet.db")
    (synchronous,) = store._database.execute("PRAGMA synchronous").fetchone()
    assert synchronous == 2
    store.close()


def test_old_and_surplus_tombstones_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOMBSTONES", 3)
    store = FleetStore(tmp_path / "fleet.db")
    for day in range(2):
        stones = [Tombstone(f"{day}-{number}", "t", "", "", day * 90_000.0 + number) for number in range(5)]
        store.write_nodes([], stones)
    assert [stone.session_id for stone in store.tombstones()] == ["1-2", "1-3", "1-4"]
    store.close()


@pytest.mark.parametrize("table", ["front", "nodes"])
def test_a_changed_row_stops_the_start(tmp_path: Path, table: str) -> None:
    path = tmp_path / "fleet.db"
    store = FleetStore(path)
    store.begin()
    store.write_nodes([StoredNode("n1", "i", 3, 2)])
    store.close()
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE {table} SET checksum = checksum + 1")
    database.close()
    store = FleetStore(path)
    with pytest.raises(StateDirError, match="damaged"):
        store.begin() if table == "front" else store.nodes()
    store.close()


def test_a_damaged_tombstone_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    store = FleetStore(path)
    store.write_nodes([], [Tombstone("a", "t", "", "", 1.0), Tombstone("b", "t", "", "", 2.0)])
    store.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE tombstones SET tenant = 'other' WHERE session_id = 'a'")
    database.close()
    store = FleetStore(path)
    assert [stone.session_id for stone in store.tombstones()] == ["b"]
    store.close()


def test_a_file_that_is_no_database_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "fleet.db"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(StateDirError, match="can't be used"):
        FleetStore(path)
    assert path.read_bytes() == b"x" * 5000
