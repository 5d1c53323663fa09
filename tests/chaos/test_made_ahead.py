"""Sandboxes that are made ahead of their sessions: each has one, fits it, and none outlives what made it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from executor_server.backends.channel.channel import GuestChannel
from executor_server.backends.local import backend as local_backend
from executor_server.backends.local.fork_server import stock
from executor_server.backends.local.fork_server.fork_server import ForkServer
from executor_server.backends.local.fork_server.forked_process import ForkedProcess
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core import SandboxFailure, SandboxSpec
from tests.support.forked_backend import ForkedBackend
from tests.support.polling import eventually_async

SPEC = SandboxSpec("base", 2**28, 32, 2**30, 60.0, fork_server="shared")


@pytest.fixture
def directory(passable_directory: Path) -> Path:
    return passable_directory


@asynccontextmanager
async def started(directory: Path, spec: SandboxSpec = SPEC) -> AsyncIterator[ForkedBackend]:
    """A backend that has made sandboxes of this spec ahead. At the end none of them is left."""
    backend = ForkedBackend(directory)
    await backend.start()
    await backend.adopt(())
    try:
        for _ in range(2):
            await backend.create(spec)
        await backend.made_ahead(stock._MAX_KEPT)
        yield backend
    finally:
        await backend.close()
    assert list((directory / "sandboxes").glob("[!.]*")) == []


def fork_server_of(backend: ForkedBackend) -> ForkServer:
    (fork_server,) = backend._started().fork_servers._serving.values()
    return fork_server


def first_of(sandbox: LocalSandbox) -> psutil.Process:
    assert isinstance(sandbox.process, ForkedProcess)
    return psutil.Process(sandbox.process.init_pid)


async def answers(sandbox: LocalSandbox) -> bool:
    channel = GuestChannel(sandbox.endpoint)
    try:
        return (await channel.connect()).generation == 1
    finally:
        channel.close()


async def test_a_session_takes_one_that_was_made_ahead_and_others_follow(directory: Path) -> None:
    async with started(directory) as backend:
        kept = await backend.made_ahead()
        assert await backend.create(SPEC) is kept[0]
        assert await answers(kept[0])
        assert len(await backend.made_ahead(stock._MAX_KEPT)) == stock._MAX_KEPT
        assert (backend.fork_server_stats().made, backend.fork_server_stats().ahead) == (3, 1)


async def test_more_sessions_at_once_than_were_made_ahead_have_each_its_own(directory: Path) -> None:
    async with started(directory) as backend:
        sandboxes = await asyncio.gather(*(backend.create(SPEC) for _ in range(stock._MAX_KEPT + 3)))
        assert len({sandbox.sandbox_id for sandbox in sandboxes}) == len(sandboxes)
        assert len({sandbox.host_uid for sandbox in sandboxes if sandbox.host_uid is not None}) in (0, len(sandboxes))
        assert all([await answers(sandbox) for sandbox in sandboxes])


@pytest.mark.parametrize("memory_bytes", [2**27, 2**29 + 8192])
async def test_its_memory_is_that_of_its_session(directory: Path, memory_bytes: int) -> None:
    async with started(directory) as backend:
        if not backend.can_change_memory or os.geteuid() != 0:
            pytest.skip("the memory of a sandbox can't be changed here")
        sandbox = await backend.create(replace(SPEC, memory_bytes=memory_bytes))
        assert backend.fork_server_stats().ahead == 1
        assert sandbox.cgroup is not None
        name = "memory.max" if sandbox.cgroup.version == 2 else "memory.limit_in_bytes"
        assert int((sandbox.cgroup.directories["memory"] / name).read_text()) == memory_bytes
        assert await answers(sandbox)
        first = first_of(sandbox)
        shm = os.statvfs(f"/proc/{first.pid}/root/dev/shm")
        assert shm.f_blocks * shm.f_frsize == memory_bytes // 2
        # The interpreter has it, and so has the checker, or there is none.
        parts = {memory_bytes // 10 * 9, memory_bytes // 2}

        def limited() -> bool:
            texts = [Path(f"/proc/{child.pid}/limits").read_text() for child in first.children()]
            limits = {int(text.partition("Max data size")[2].split()[0]) for text in texts}
            return memory_bytes // 10 * 9 in limits and limits <= parts

        assert await eventually_async(limited)


@pytest.mark.parametrize("changed", [{"processes": 33}, {"disk_bytes": 2**20}, {"max_files": 7}, {"cpus": 0.5}])
async def test_one_of_another_shape_is_made_for_its_session(directory: Path, changed: dict[str, float]) -> None:
    async with started(directory) as backend:
        kept = await backend.made_ahead()
        assert await backend.create(replace(SPEC, **changed)) not in kept  # type: ignore[arg-type]  # of each field its type
        assert backend.fork_server_stats().ahead == 0


async def test_shapes_that_come_once_make_nothing_ahead(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_PAUSE_S", 0.0)
    backend = ForkedBackend(directory)
    await backend.start()
    await backend.adopt(())
    try:
        for processes in range(10, 16):
            await backend.create(replace(SPEC, processes=processes))
        assert {each.stock._filling for each in backend._started().fork_servers._serving.values()} == {None}
    finally:
        await backend.close()


async def test_one_that_died_is_given_to_no_session(directory: Path) -> None:
    async with started(directory) as backend:
        kept = await backend.made_ahead()
        first_of(kept[0]).kill()
        assert kept[0].process is not None and await eventually_async(kept[0].process.has_ended)
        assert await backend.create(SPEC) is kept[1]
        assert await eventually_async(lambda: kept[0] not in backend._live)


async def test_one_ends_when_the_daemon_that_made_it_is_gone(directory: Path) -> None:
    async with started(directory) as backend:
        kept = await backend.made_ahead()
        process = kept[0].process
        assert isinstance(process, ForkedProcess) and process._word is not None
        process._word.close()  # as the kernel does with all that a dead process had
        assert await eventually_async(process.has_ended)


async def test_a_daemon_that_is_killed_leaves_none_behind(directory: Path) -> None:
    command = (sys.executable, "-m", "tests.support.killed_ahead", str(directory), str(stock._MAX_KEPT))
    daemon = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await daemon.communicate()
    assert daemon.returncode == -signal.SIGKILL
    ahead = [int(pid) for pid in said.split()]
    assert len(ahead) == stock._MAX_KEPT
    assert await eventually_async(lambda: not any(psutil.pid_exists(pid) for pid in ahead))
    backend = ForkedBackend(directory)
    await backend.start()
    await backend.adopt(())  # destroys what is left of them, and the sandboxes of no session
    await backend.close()
    assert list((directory / "sandboxes").glob("[!.]*")) == []


async def test_they_end_with_their_fork_server(directory: Path) -> None:
    async with started(directory) as backend:
        kept, fork_server = await backend.made_ahead(), fork_server_of(backend)
        fork_server.retire("the test asks for no more")
        assert await eventually_async(lambda: backend._live.isdisjoint(kept))
        await fork_server.stock.ended()


async def test_they_end_when_no_session_comes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_KEPT_S", 0.2)
    async with started(directory) as backend:
        filling = fork_server_of(backend).stock._filling
        assert filling is not None
        await asyncio.wait([filling])
        await fork_server_of(backend).stock.ended()
        assert len(backend._live) == 2


async def test_they_make_room_where_a_sandbox_can_not_be_made(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> int:
        raise SandboxFailure("all are taken")

    async with started(directory) as backend:
        kept = await backend.made_ahead()
        monkeypatch.setattr(local_backend, "_next_user", full)
        with pytest.raises(SandboxFailure, match="all are taken"):
            await backend.create(replace(SPEC, processes=33))
        assert await eventually_async(lambda: backend._live.isdisjoint(kept))


async def test_none_is_made_where_the_host_has_no_memory_left(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(directory) as backend:
        monkeypatch.setattr(local_backend, "available_memory_bytes", lambda: SPEC.memory_bytes - 1)
        await backend.create(SPEC)
        assert await eventually_async(lambda: len(backend._live) == 3)
