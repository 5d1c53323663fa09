"""No audited client or sandbox can write the audit log: not its lines, not its size, not one file of it."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor_client import ExecutorClient, ExecutorClientError, Outcome
from executor_server.policy.audit.verification import verify
from tests.support.attacks import LINK
from tests.support.audit import paths, records
from tests.support.daemon import Daemon

FORGED = 'x"}\n{"seq":1,"prev":"' + "0" * 64 + '","time":"2026-11-21T09:00:00.000001Z","kind":"daemon_stopped"'
HOSTILE = f"{FORGED}\r\x1b[2J\x07\u202e\u2028\x7f\x85"
STRANGERS = 300


@pytest.fixture
def log(daemon: Daemon) -> Path:
    return daemon.state_dir / "audit"


def lines(log: Path) -> list[bytes]:
    return [line for path in paths(log) for line in path.read_bytes().splitlines(keepends=True)]


def assert_sound(log: Path) -> None:
    """Asserts one line of printable ASCII for each record, and a record for each number."""
    found = lines(log)
    assert all(line.endswith(b"\n") and all(0x20 <= byte < 0x7F for byte in line[:-1]) for line in found)
    assert [record["seq"] for record in records(log)] == list(range(1, len(found) + 1))
    assert verify(log).whole


def test_text_of_a_client_is_only_ever_inside_a_record(daemon: Daemon, log: Path) -> None:
    with daemon.client() as client:
        with client.create_session(labels={"purpose": HOSTILE}) as session:
            session.put_file(HOSTILE, b"x")
            for call in (
                lambda: session.get_file(HOSTILE),
                lambda: session.get_variables([HOSTILE]),
                lambda: session.execute(HOSTILE),
                lambda: session.execute("1", execution_id=HOSTILE),
            ):
                with contextlib.suppress(ExecutorClientError, ValueError):
                    call()
        with pytest.raises(ExecutorClientError):
            client.create_session(image=HOSTILE)
        with pytest.raises(ExecutorClientError):
            client.create_session(authorized_imports=[HOSTILE])
    assert_sound(log)
    assert "daemon_stopped" not in [record["kind"] for record in records(log)]
    requested = [record for record in records(log) if record["kind"] == "session_requested"][-1]
    assert requested["labels"] == [f"purpose={HOSTILE}"]


def test_text_of_a_sandbox_is_only_ever_inside_a_record(daemon: Daemon, log: Path) -> None:
    error = json.dumps({"type": HOSTILE, "message": HOSTILE, "traceback": HOSTILE, "statement": HOSTILE}).encode()
    with daemon.client() as client, client.create_session(authorized_imports=["*"]) as session:
        assert session.execute(f"{LINK}done('exception', {error!r})").outcome is Outcome.EXCEPTION
    assert_sound(log)
    (ended,) = [record for record in records(log) if record.get("error", "").startswith("x")]
    assert ended["error"].startswith(FORGED[:100])


def test_a_flood_of_strangers_is_a_few_records(daemon: Daemon, log: Path) -> None:
    before = len(lines(log))

    def knock(_number: int) -> None:
        stranger = ExecutorClient(daemon.address, token="w" * 43, reconnect_timeout_s=0.0, busy_timeout_s=0.0)
        with stranger, contextlib.suppress(ExecutorClientError):
            stranger.get_policy()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(knock, range(STRANGERS)))
    assert len(lines(log)) - before < 10


def test_a_flood_of_refused_requests_is_a_few_records(daemon: Daemon, log: Path) -> None:
    before = len(lines(log))
    with daemon.client() as client:
        for _ in range(STRANGERS):
            with pytest.raises(ExecutorClientError):
                client.create_session(limits={"memory_bytes": 10**15})
    assert len(lines(log)) - before < 50


def test_the_log_can_not_be_seen_from_a_sandbox(daemon: Daemon, log: Path) -> None:
    with daemon.client() as client, client.create_session(authorized_imports=["os"]) as session:
        assert session.execute(f"import os\nos.path.exists({str(log)!r})").output is False
