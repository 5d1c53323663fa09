"""The audit log stays one chain however the daemon ends, and the daemon continues whatever happens to the log."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor_client import ExecutorClient, ExecutorClientError, Outcome, Session
from executor_server.policy.audit.verification import verify
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S
from tests.support.audit import paths, records
from tests.support.daemon import Daemon
from tests.support.polling import eventually
from tests.support.rounds import rounds

KILLS = rounds(50, 4)
SESSIONS = 3
# Bytes of the log from a daemon's start to its kill: a few more each time, so that each kill hits another position.
LEAST_BYTES = 2_000
MORE_BYTES = 37
SMALL_FILES = "max_file_bytes = 65_536\n"

POLICY = """
default = "p"
[profiles.p.audit]
fail_closed = {fail_closed}
"""


def audit_dir(daemon: Daemon) -> Path:
    return daemon.state_dir / "audit"


def size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in paths(directory))


def grown(directory: Path, by_bytes: int) -> bool:
    enough = size_bytes(directory) + by_bytes
    return eventually(lambda: size_bytes(directory) > enough, timeout_s=WAIT_S)


@pytest.mark.timeout(600)
def test_kills_under_load_leave_one_chain(start: StartDaemon) -> None:
    config = f"pool.size = 0\n[audit]\n{SMALL_FILES}"
    daemon = start(config)
    over = threading.Event()

    def execute(session: Session) -> None:
        while not over.is_set():
            assert session.execute("1 + 1").output == 2

    def create(client: ExecutorClient) -> None:
        while not over.is_set():
            with contextlib.suppress(ExecutorClientError):
                client.create_session().close()

    # A call may find no daemon through several kills: each lives no longer than the other calls need to grow its log.
    with daemon.client(reconnect_timeout_s=KILLS * WAIT_S) as client, ThreadPoolExecutor() as threads:
        sessions = [client.create_session(detached=True) for _ in range(SESSIONS)]
        load = [threads.submit(execute, session) for session in sessions]
        load.append(threads.submit(create, client))
        try:
            for kill in range(KILLS):
                assert grown(audit_dir(daemon), LEAST_BYTES + kill * MORE_BYTES)
                daemon.kill()
                verdict = verify(audit_dir(daemon))
                assert verdict.whole, verdict.problems
                daemon = start(config)
        finally:
            over.set()
        for each in load:
            each.result(WAIT_S)
    found = records(audit_dir(daemon))
    assert sum(record["kind"] == "daemon_started" for record in found) == KILLS + 1
    assert verify(audit_dir(daemon)).records == found[-1]["seq"]
    requested, ended = (
        [record["execution"] for record in found if record["kind"] == kind]
        for kind in ("execution_requested", "execution_ended")
    )
    assert len(set(ended)) == len(ended)
    assert set(ended) <= set(requested)


# -- a full disk


def with_audit_on(disk: Path, *, fail_closed: bool) -> str:
    policy = disk / "policy.toml"
    policy.write_text(POLICY.format(fail_closed=str(fail_closed).lower()))
    return f'policy.file = "{policy}"\naudit.directory = "{disk / "audit"}"\naudit.sync = "always"\n'


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return filler


def test_a_full_disk_stops_what_may_not_run_unrecorded_until_there_is_room(disk: Path, start: StartDaemon) -> None:
    daemon = start(with_audit_on(disk, fail_closed=True))
    impatient = daemon.client(reconnect_timeout_s=0.1, busy_timeout_s=0.0)
    with impatient as client, client.create_session() as session, ThreadPoolExecutor() as threads:
        endless = client.create_session()
        runs = threading.Event()
        code = "print('runs', flush=True)\nwhile True: pass"
        running = threads.submit(endless.execute, code, on_event=lambda _event: runs.set())
        assert runs.wait(WAIT_S)
        filler = fill(disk)
        with pytest.raises(ExecutorClientError, match="audit log"):
            while True:  # until the last page is full
                session.execute("1")
        cancelled = running.result(WAIT_S)
        assert cancelled.outcome is Outcome.CANCELLED
        assert cancelled.error is not None
        assert "audit log" in cancelled.error.message
        filler.unlink()
        with daemon.client() as patient:
            assert patient.get_session(session.session_id).execute("2").output == 2
    assert "audit_gap" in {record["kind"] for record in records(disk / "audit")}
    assert verify(disk / "audit").whole


def test_a_full_disk_stops_nobody_else_and_the_log_says_what_it_lacks(disk: Path, start: StartDaemon) -> None:
    daemon = start(with_audit_on(disk, fail_closed=False))
    with daemon.client() as client, client.create_session() as session:
        filler = fill(disk)
        while "audit_not_written" not in daemon.log.read_text():
            assert session.execute("1").output == 1
        filler.unlink()
        assert eventually(lambda: "audit_written_again" in daemon.log.read_text())
        session.execute("2")
    gap = next(record for record in records(disk / "audit") if record["kind"] == "audit_gap")
    assert (gap["error"], gap["records"] > 0) == ("ENOSPC", True)
    assert verify(disk / "audit").whole
