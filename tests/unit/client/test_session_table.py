"""The sessions of a daemon, as `executor top` and the console keep them."""

from __future__ import annotations

import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client._core import session_table
from executor_client._core.session_table import SessionTable


def _message(
    *session_ids: str, state: int = 0, forgotten: tuple[str, ...] = (), complete: bool = False
) -> admin_pb.WatchSessionsResponse:
    message = admin_pb.WatchSessionsResponse(forgotten_ids=forgotten, complete=complete)
    for session_id in session_ids:
        message.sessions.add().owned.session.session_id = session_id
        message.sessions[-1].use.executions = state
    return message


def test_the_sessions_of_a_new_stream_replace_those_before_once_all_have_arrived() -> None:
    table = SessionTable()
    table.begin()
    assert not table.take(_message("a"))
    assert not table.views
    assert table.take(_message("b", complete=True))
    assert table.take(_message("c", forgotten=("a",)))
    assert set(table.views) == {"b", "c"}
    table.begin()
    assert not table.take(_message("d"))
    assert set(table.views) == {"b", "c"}
    assert table.take(_message(complete=True))
    assert set(table.views) == {"d"}


def test_a_full_table_still_follows_the_sessions_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """`executor top` ignored every change from then on."""
    monkeypatch.setattr(session_table, "SESSIONS_MAX", 2)
    table = SessionTable()
    table.begin()
    table.take(_message("a", "b", "c", complete=True))
    table.take(_message("a", "c", state=7))
    assert {session_id: view.use.executions for session_id, view in table.views.items()} == {"a": 7, "b": 0}
