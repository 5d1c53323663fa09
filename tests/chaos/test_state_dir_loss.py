"""The state directory is deleted, full or unwritable while the daemon runs: what runs goes on, what is new is refused."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_client import ExecutorClient, Outcome, UnavailableError
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import sandbox_directories
from tests.support.daemon import STOP_TIMEOUT_S
from tests.support.polling import eventually

NO_POOL = "pool.size = 0"


@pytest.fixture
def file_system(directory: Path) -> Iterator[Path]:
    """The state directory as a file system of its own, of 4 MiB."""
    state_dir = directory / "s"
    state_dir.mkdir(mode=0o700)
    options = "size=4m,mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(state_dir)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr}")
    yield state_dir
    subprocess.run(["umount", str(state_dir)], check=True)


@contextmanager
def unwritable(directory: Path) -> Iterator[None]:
    """Even for root: nothing can be made in it, nothing removed."""
    if subprocess.run(["chattr", "+i", str(directory)], capture_output=True, check=False).returncode != 0:
        pytest.skip("no directory can be made immutable here")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(directory)], check=True)


def refuses_new_sessions(client: ExecutorClient) -> bool:
    with pytest.raises(UnavailableError) as refusal:
        client.create_session()
    return refusal.value.reason == "BACKEND_UNAVAILABLE"


def test_full_disk_refuses_new_sessions_until_there_is_room(file_system: Path, start: StartDaemon) -> None:
    daemon = start(NO_POOL)
    filler = file_system / "filler"
    with daemon.client() as client, client.create_session() as session:
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert refuses_new_sessions(client)
        assert session.execute("1 + 1").output == 2
        assert len(sandbox_directories(daemon)) == 1
        filler.unlink()
        with client.create_session() as another:
            assert another.execute("6 * 7").output == 42


def test_unwritable_state_directory_refuses_new_sessions_and_ends_old_ones(start: StartDaemon) -> None:
    daemon = start(NO_POOL)
    with daemon.client() as client:
        session = client.create_session()
        expiring = client.create_session(limits={"idle_time_s": 0.1})
        with unwritable(daemon.state_dir / "sandboxes"):
            assert refuses_new_sessions(client)
            assert session.execute("1 + 1").output == 2
            assert eventually(lambda: expiring.session_id not in {each.session_id for each in client.list_sessions()})
            session.close()
            assert client.list_sessions() == []
        with client.create_session(limits={"idle_time_s": 2}) as another:
            assert another.execute("6 * 7").output == 42
            assert eventually(lambda: not client.list_sessions()), "nobody sweeps any more"
        assert "INTERNAL" not in daemon.log.read_text() and "incident" not in daemon.log.read_text()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(STOP_TIMEOUT_S) == 0
        assert sandbox_directories(daemon) == set(), "what could not be removed then is removed now"


def test_deleted_state_directory_refuses_new_sessions_and_lets_others_go_on(
    directory: Path, start: StartDaemon
) -> None:
    daemon = start(NO_POOL)
    with daemon.client() as client:
        session = client.create_session()
        shutil.rmtree(daemon.state_dir)
        assert refuses_new_sessions(client)
        assert session.execute("1 + 1").outcome is Outcome.SUCCEEDED
        session.close()
        daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(STOP_TIMEOUT_S) == 0


def test_full_disk_through_two_kills_costs_no_session(file_system: Path, start: StartDaemon) -> None:
    """The count of shown tokens was not written, so the second daemon was refused by every guest."""
    daemon = start(NO_POOL)
    with daemon.client() as client:
        sessions = [client.create_session() for _ in range(2)]
        for session in sessions:
            session.execute("x = 6")
        filler = file_system / "filler"
        with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for _ in range(2):
            daemon.kill()
            daemon = start(NO_POOL)
        assert [each.lost_reason for each in client.list_sessions()] == ["", ""]
        filler.unlink()
        assert [session.execute("x * 7").output for session in sessions] == [42, 42]
        for session in sessions:
            session.close()
