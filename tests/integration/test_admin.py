"""Admin calls against a real daemon: what an operator does is what clients meet."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack

import pytest

from executor_client import ExecutorClient, ExecutorClientError
from tests.support.daemon import Daemon
from tests.support.fork_server import server
from tests.support.polling import eventually
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


def test_a_policy_that_is_not_valid_changes_nothing_and_is_told(watched: Watched, client: ExecutorClient) -> None:
    before, valid = client.get_policy().policy, watched.policy_path.read_text()
    watched.policy_path.write_text(valid.replace("plain", "other", 1))
    try:
        refused = admin(watched, "reload")
    finally:
        watched.policy_path.write_text(valid)
    assert refused.returncode == 1
    assert "default: no such profile" in refused.stderr
    assert client.get_policy().policy == before
    assert eventually(lambda: watched.value("policy_reloads_total", result="refused"))


def test_usage_tells_what_a_tenant_has(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.execute("sum(range(10**6))")
        (use,) = answer(watched, "usage", "--tenant", "local")["tenants"]
    assert (use["profile"], use["sessions"], use["quotas"]["sessions"]) == ("plain", 1, "3")
    assert use["cpu_time_s_in_last_hour"] > 0


def test_admin_calls_are_for_admins(watched: Watched) -> None:
    token = watched.daemon.new_token("acme")

    def refused() -> str:
        return admin(watched, "sessions", EXECUTOR_TOKEN=token).stderr

    assert eventually(lambda: refused().startswith("PERMISSION_DENIED")), refused()


def test_admin_calls_are_in_the_audit_log(watched: Watched) -> None:
    admin(watched, "kill", "nothing-of-that-name")
    records = [
        json.loads(line)
        for file in sorted((watched.daemon.state_dir / "audit").glob("audit-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    called = [record for record in records if record["kind"] == "admin_called"]
    assert any("nothing-of-that-name" in json.dumps(record) for record in called)
