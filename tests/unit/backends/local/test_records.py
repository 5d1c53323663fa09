"""A daemon takes over or destroys the sandboxes of an earlier one, and leaves other processes alone."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.records import ProcessRecord, Record, read_record, write_record
from executor_server.backends.local.recovery import recover, still_serves
from executor_server.backends.local.sandbox import LocalSandbox

SANDBOX_ID = "ab12"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def directory(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> Path:
    """The directory of a sandbox whose processes are the sleeper."""
    directory = tmp_path / SANDBOX_ID
    directory.mkdir()
    process = ProcessRecord.of(sleeper.pid)
    cgroup = Cgroup(1, {"memory": tmp_path / f"executor-d-{SANDBOX_ID}"})
    write_record(directory, Record(SANDBOX_ID, "made-of", process, process, 2_000_000_007, cgroup))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "guest.sock"))
    return directory


def _recovered(directory: Path) -> LocalSandbox:
    return recover(directory, b"token", lambda sandbox: None)


def _change(directory: Path, **changes: object) -> None:
    path = directory / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


async def test_a_sandbox_that_lives_comes_back_as_it_was(directory: Path, tmp_path: Path) -> None:
    sandbox = _recovered(directory)
    assert still_serves(sandbox)
    assert (sandbox.sandbox_id, sandbox.fingerprint, sandbox.host_uid) == (SANDBOX_ID, "made-of", 2_000_000_007)
    assert sandbox.cgroup == Cgroup(1, {"memory": tmp_path / f"executor-d-{SANDBOX_ID}"})
    assert (sandbox.endpoint.socket_path, sandbox.endpoint.token) == (directory / "guest.sock", b"token")
    await sandbox.destroy()


async def test_its_processes_are_killed_and_its_directory_removed(
    directory: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    await _recovered(directory).destroy()
    assert sleeper.wait() == -9
    assert not directory.exists()


@pytest.mark.parametrize("change", [{"start_time": 1, "monitor_start_time": 1}, {"boot_id": "another"}])
async def test_another_process_with_the_same_id_is_left_alone(
    directory: Path, sleeper: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    _change(directory, **change)
    sandbox = _recovered(directory)
    assert not still_serves(sandbox)
    await sandbox.destroy()
    assert sleeper.poll() is None
    assert not directory.exists()


async def test_a_process_that_has_ended_does_not_stop_the_teardown(
    directory: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    sleeper.kill()
    sleeper.wait()
    sandbox = _recovered(directory)
    assert not still_serves(sandbox)
    await sandbox.destroy()
    assert not directory.exists()


async def test_one_that_dies_after_it_was_found_does_not_serve(
    directory: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    sandbox = _recovered(directory)
    sleeper.kill()
    sleeper.wait()
    assert not still_serves(sandbox)
    assert await sandbox.cause_of_death() == "its first process ended"
    await sandbox.destroy()


@pytest.mark.parametrize("instead", ["nothing", "a file"])
async def test_one_without_its_socket_does_not_serve(directory: Path, instead: str) -> None:
    (directory / "guest.sock").unlink()
    if instead == "a file":
        (directory / "guest.sock").touch()
    sandbox = _recovered(directory)
    assert not still_serves(sandbox)
    await sandbox.destroy()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "1"])
async def test_an_incomplete_record_means_that_nothing_ran(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "cd34"
    directory.mkdir()
    (directory / "record.json").write_text(text)
    assert read_record(directory) is None
    sandbox = _recovered(directory)
    assert not still_serves(sandbox)
    await sandbox.destroy()
    assert not directory.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"sandbox_id": "ef56"},
        {"pid": "1"},
        {"pid": True},
        {"pid": -1},
        {"host_uid": 0},
        {"fingerprint": ""},
        {"cgroups": {"memory": "/sys/fs/cgroup/memory"}},
        {"cgroups": {"memory": f"executor-d-{SANDBOX_ID}"}},
    ],
)
def test_a_record_that_was_not_written_for_this_sandbox_is_not_believed(
    directory: Path, change: dict[str, object]
) -> None:
    """The processes and groups that it names would be killed, by root."""
    _change(directory, **change)
    assert read_record(directory) is None
