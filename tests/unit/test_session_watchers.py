"""What is kept for a watcher of sessions that does not read."""

from __future__ import annotations

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api.session_views import Watcher
from executor_server.core import Principal


def test_a_watcher_that_does_not_read_is_owed_no_session_that_came_and_went() -> None:
    watcher, view = Watcher(Principal("a", "p", is_admin=True), ""), admin_pb.SessionView()
    watcher.note("sent", "a", view)
    assert dict(watcher.take()) == {"sent": view}
    for number in range(1000):
        watcher.note(f"s{number}", "a", view)
        watcher.note(f"s{number}", "a", None)
    watcher.note("sent", "a", None)
    assert dict(watcher.take()) == {"sent": None}
    watcher.note("sent", "a", None)
    assert not watcher.take()
