"""Daemons that outlive the process that started them, are started once, and are ended by nothing but their own end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from executor_server.fleet.ray.daemon import DaemonError, OwnDaemon
from executor_server.fleet.ray.processes import identity_of, read_pid_file, session_members, write_pid_file
from executor_server.fleet.ray.watcher import DaemonWatcher
from tests.support.polling import eventually, has_ended

SLEEPER = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('runs', flush=True); time.sleep(600)",
]
# Starts a daemon with OwnDaemon, says which, and waits to be killed.
STARTER = """
import sys, time
from pathlib import Path
from executor_server.fleet.ray.daemon import OwnDaemon
print(OwnDaemon(Path(sys.argv[1]), "node").start(sys.argv[2:]).identity.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OwnDaemon]:
    own = OwnDaemon(tmp_path, "node")
    yield own
    own.stop(0.0)


def runs(daemon: OwnDaemon) -> bool:
    return "runs" in daemon.log_tail()


def test_a_daemon_is_a_child_of_no_one_and_leads_a_session_of_its_own(daemon: OwnDaemon) -> None:
    started = daemon.start(SLEEPER)
    process = psutil.Process(started.identity.pid)
    assert not started.adopted
    assert process.ppid() != os.getpid()
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    assert [member.pid for member in session_members(process.pid)] == [process.pid]
    assert oct(daemon.pid_file.stat().st_mode & 0o777) == "0o600"


def test_a_daemon_outlives_its_starter_and_all_of_its_starters_process_group(daemon: OwnDaemon, tmp_path: Path) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path), *SLEEPER], stdout=subprocess.PIPE, start_new_session=True
    )
    assert starter.stdout is not None
    pid = int(starter.stdout.readline())
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    identity = daemon.identity()
    assert identity is not None
    assert identity.pid == pid


def test_a_second_start_adopts_the_daemon_that_runs(daemon: OwnDaemon) -> None:
    first = daemon.start(SLEEPER)
    second = daemon.start(SLEEPER)
    assert second.adopted
    assert second.identity == first.identity


def test_of_many_starters_at_one_moment_one_starts_it_and_the_others_adopt_it(daemon: OwnDaemon) -> None:
    started = []
    threads = [threading.Thread(target=lambda: started.append(daemon.start(SLEEPER))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.adopted for each in started].count(False) == 1
    assert len({each.identity for each in started}) == 1


def test_another_process_with_the_number_of_a_daemon_is_neither_adopted_nor_ended(daemon: OwnDaemon) -> None:
    other = subprocess.Popen(SLEEPER, stdout=subprocess.DEVNULL)
    try:
        identity = identity_of(other.pid)
        assert identity is not None
        fields = {"pid": other.pid, "start_time": identity.start_time - 1, "boot_id": identity.boot_id}
        for change in ({}, {"start_time": identity.start_time, "boot_id": "another"}):
            daemon.pid_file.write_text(json.dumps({**fields, **change}))
            assert daemon.identity() is None
            assert daemon.stop(0.0)
            assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"pid": -1, "start_time": 0, "boot_id": ""}', '{"pid": "x"}', '{"pid": 1e400}', "\x00" * 9000],
)
def test_a_pid_file_of_another_shape_names_no_process(tmp_path: Path, text: str) -> None:
    pid_file = tmp_path / "x.pid"
    pid_file.write_text(text)
    assert read_pid_file(pid_file) is None


def test_a_process_that_has_ended_and_was_not_reaped_counts_as_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    identity = identity_of(child.pid)
    assert identity is not None and child.stdin is not None
    child.stdin.close()
    assert identity.wait(30.0)
    assert not identity.send(signal.SIGTERM)
    child.wait()


def test_what_ray_does_to_its_workers_does_not_reach_the_daemon(
    daemon: OwnDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("EXECUTOR_KEPT", "1")
    process = psutil.Process(daemon.start(SLEEPER).identity.pid)
    assert eventually(lambda: runs(daemon))
    environment = process.environ()
    assert environment["EXECUTOR_KEPT"] == "1"
    assert not [name for name in environment if name.startswith("RAY_") or name == "OMP_NUM_THREADS"]
    assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "0"
    assert sorted(os.listdir(f"/proc/{process.pid}/fd")) == ["0", "1", "2"]  # noqa: PTH208 - no files to open


def test_a_command_that_is_not_there_is_reported(daemon: OwnDaemon) -> None:
    with pytest.raises(DaemonError, match="could not be started"):
        daemon.start(["/nothing/there"])


def test_a_daemon_that_ignores_being_asked_is_killed(daemon: OwnDaemon) -> None:
    process = psutil.Process(daemon.start(STUBBORN).identity.pid)
    assert eventually(lambda: runs(daemon))
    assert not daemon.stop(0.1)
    assert has_ended(process)
    assert daemon.stop(0.1)
    assert not daemon.pid_file.exists()


def test_a_daemon_that_dies_is_started_again_and_one_that_is_stopped_is_not(daemon: OwnDaemon) -> None:
    prepared = []
    watcher = DaemonWatcher(daemon, SLEEPER, lambda: prepared.append(1))
    watcher.start()
    first = daemon.identity()
    assert first is not None
    first.send(signal.SIGKILL)
    second = eventually(lambda: (now := daemon.identity()) is not None and now != first and now)
    assert second
    assert watcher.stop()
    watcher.start()
    assert daemon.identity() is None
    assert (len(prepared), watcher.restarts) == (2, 1)


def test_a_watcher_adopts_and_prepares_nothing_for_a_daemon_that_runs(daemon: OwnDaemon) -> None:
    running = daemon.start(SLEEPER).identity
    prepared: list[int] = []
    watcher = DaemonWatcher(daemon, SLEEPER, lambda: prepared.append(1))
    watcher.start()
    assert watcher.adopted
    assert daemon.identity() == running
    assert watcher.stop()
    assert prepared == []


def test_a_pid_file_is_replaced_whole(tmp_path: Path) -> None:
    identity = identity_of(os.getpid())
    assert identity is not None
    write_pid_file(tmp_path / "node.pid", identity)
    assert read_pid_file(tmp_path / "node.pid") == identity
    assert [path.name for path in tmp_path.iterdir()] == ["node.pid"]
