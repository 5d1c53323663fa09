"""Admin calls against a real daemon: what an operator does is what clients meet."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack

import pytest

from executor_client import ExecutorClient, ExecutorClientError, Outcome
from tests.support.daemon import Daemon
from tests.support.fork_server import server
from tests.support.watched import Watched


@pytest.fixture(scope="module")
def daemon(watched: Watched) -> Daemon:
    return watched.daemon


def admin(watched: Watched, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`executor-server admin`, as a user of the daemon's machine runs it."""
    return server("admin", *arguments, **{"EXECUTOR_STATE_DIR": str(watched.daemon.state_dir), **environment})


def answer(watched: Watched, *arguments: str) -> dict:
    ran = admin(watched, *arguments, "--json")
    assert ran.returncode == 0, ran.stderr
    found: dict = json.loads(ran.stdout)
    return found


def test_a_session_that_is_killed_is_gone_for_its_client(watched: Watched, client: ExecutorClient) -> None:
    session = client.create_session()
    (listed,) = answer(watched, "sessions")["sessions"]
    assert (listed["tenant"], listed["session"]["session_id"]) == ("local", session.session_id)
    assert admin(watched, "kill", session.session_id).returncode == 0
    with pytest.raises(ExecutorClientError):
        session.execute("1")
    assert answer(watched, "sessions")["sessions"] == []
    assert watched.reports(1, "sessions_ended_total", profile="plain", reason="killed")


def test_a_step_that_is_stopped_says_so_and_its_session_goes_on(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session:

        def stop(_event: object) -> None:
            assert admin(watched, "stop", session.session_id, "e1").returncode == 0

        result = session.execute("print('begun')\nimport time\ntime.sleep(600)", execution_id="e1", on_event=stop)
        assert result.outcome is Outcome.CANCELLED
        assert result.error is not None and "an administrator stopped it" in result.error.message
        assert session.execute("1 + 1").output == 2


def test_a_drained_daemon_goes_on_with_what_there_is(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session, ExitStack() as stack:
        assert answer(watched, "drain") == {"draining": True, "sessions": 1, "busy": 0, "moved": []}
        try:
            assert session.execute("1 + 1").output == 2
            impatient = stack.enter_context(watched.daemon.client(reconnect_timeout_s=0.01))
            with pytest.raises(ExecutorClientError, match="no new sessions"):
                impatient.create_session()
        finally:
            assert not answer(watched, "resume")["draining"]
    with client.create_session() as session:
        assert session.execute("1 + 1").output == 2


def test_a_reload_brings_another_policy_into_force(watched: Watched, client: ExecutorClient) -> None:
    watched.write_policy("2")
    printed = answer(watched, "reload")
    policy = client.get_policy().policy
    assert (
        (printed["version"], printed["fingerprint"])
        == ("2", policy.fingerprint)
        == (policy.version, policy.fingerprint)
    )
    assert watched.reports(1, "policy_info", version="2", fingerprint=policy.fingerprint)
