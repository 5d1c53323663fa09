"""Metrics of a real daemon: Prometheus reads what clients did."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from executor_client import ExecutorClient, ExecutorClientError
from tests.support.daemon import Daemon
from tests.support.fork_server import server
from tests.support.polling import eventually
from tests.support.watched import Watched


@pytest.fixture(scope="module")
def daemon(watched: Watched) -> Daemon:
    return watched.daemon


def test_executions_and_sessions_are_counted(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.execute("1 + 1")
        session.execute("1 / 0")
        assert watched.reports(1, "sessions", state="idle", profile="plain", backend="local")
    assert watched.reports(1, "sessions_ended_total", profile="plain", reason="deleted")
    assert watched.value("executions_total", outcome="succeeded", profile="plain") == 1
    assert watched.value("executions_total", outcome="exception", profile="plain") == 1
    assert watched.value("executions_unfinished") == 0
    created = [watched.value("session_creation_seconds_count", start=start) or 0 for start in ("warm", "cold")]
    assert sum(created) == 1


def test_phases_of_an_execution_are_measured(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.register_tools({"double": lambda x: 2 * x})
        assert session.execute("double(21)").output == 42
    assert watched.reports(1, "tool_answers_total", result="value")
    for phase in ("admission", "queued", "first_event", "running", "tool"):
        assert watched.value("phase_seconds_count", phase=phase), phase


def test_refusals_are_counted_by_reason_and_method(watched: Watched, client: ExecutorClient) -> None:
    with pytest.raises(ExecutorClientError):
        client.create_session(limits={"memory_bytes": 2**60})
    assert watched.reports(1, "policy_violations_total", kind="above_ceiling")
    labels = {"reason": "POLICY_VIOLATION", "method": "ExecutorService/CreateSession"}
    assert watched.value("requests_refused_total", **labels) == 1


def test_approvals_are_counted_by_who_decided(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.register_tools({"delete": lambda: None})
        session.execute("delete()")
        with watched.daemon.client(on_approval=lambda approval: "once") as asked:
            same = asked.get_session(session.session_id)  # while it lives, its requests are this client's
            session.execute("delete()")
            assert same.session_id == session.session_id
    assert watched.reports(1, "approvals_total", kind="tool", decision="refused")
    assert watched.reports(1, "approvals_total", kind="tool", decision="once")
    assert (watched.value("approvals_waiting"), watched.value("approval_seconds_count")) == (0, 1)


def test_wrong_tokens_are_counted(watched: Watched) -> None:
    with ExecutorClient(watched.daemon.address, token="x" * 43) as stranger, pytest.raises(ExecutorClientError):
        stranger.get_policy()
    labels = {"reason": "UNAUTHENTICATED", "method": "ExecutorService/GetPolicy"}
    assert watched.reports(1, "requests_refused_total", **labels)


def test_a_warning_of_a_limit_is_counted(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session(limits={"operations": 1000}) as session:
        session.execute("for i in range(900): pass")
    assert watched.reports(1, "limit_warnings_total", limit="operations")


def test_pool_policy_tenant_and_build_are_reported(watched: Watched, client: ExecutorClient) -> None:
    assert eventually(lambda: watched.value("pool_depth", image="base") == watched.value("pool_size", image="base"))
    with client.create_session():
        assert watched.reports(1, "tenant_use", tenant="local", quota="sessions")
    assert watched.value("tenant_quota", tenant="local", quota="sessions") == 3
    fingerprint = client.get_policy().policy.fingerprint
    assert watched.value("policy_info", version="1", fingerprint=fingerprint) == 1
    assert "remote_executor_build_info{" in watched.page()
    assert watched.value("audit_records_total")


def test_a_scraper_that_hangs_delays_no_execution(watched: Watched, client: ExecutorClient) -> None:
    """Sixteen scrapers send a request and never read the answer, and sixteen send none."""
    host, port = watched.metrics_url.removeprefix("http://").removesuffix("/metrics").split(":")
    with contextlib.ExitStack() as stack:
        for number in range(32):
            hung = stack.enter_context(socket.create_connection((host, int(port))))
            with contextlib.suppress(OSError):  # a connection over the limit may be closed already
                hung.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" if number % 2 else b"GET")
        with client.create_session() as session:
            assert session.execute("1 + 1").output == 2


def test_a_port_that_is_taken_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "c.toml").write_text(f'[metrics]\nlisten = "{address}"\n')
        place = ["--listen", f"unix:{tmp_path}/s.sock", "--state-dir", str(tmp_path / "s")]
        ended = server("serve", "--config", str(tmp_path / "c.toml"), *place)
    assert ended.returncode == 4
    assert f"Can't listen on {address} for metrics: it is in use" in ended.stderr
    assert "Traceback" not in ended.stderr
