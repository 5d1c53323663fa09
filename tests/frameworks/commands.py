"""What still runs in a daemon's sessions."""

from __future__ import annotations

from tests.support.daemon import Daemon


def running_commands(daemon: Daemon) -> list[tuple[str, ...]]:
    """The commands that still run in the default tenant's sessions."""
    with daemon.client() as client:
        sessions = [client.get_session(each.session_id) for each in client.list_sessions()]
        return [each.argv for session in sessions for each in session.processes.list() if each.running]
