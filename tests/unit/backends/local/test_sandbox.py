"""A sandbox explains its own end."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.backends.channel.endpoint import SocketEndpoint
from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.guest.wire import exit_codes

KILLED = 137


class Ended:
    """A first process that has ended."""

    init_pid = 1

    def __init__(self, code: int | None) -> None:
        self._code = code

    def has_ended(self) -> bool:
        return True

    async def exit_code(self, deadline: float) -> int | None:
        return self._code

    def last_words(self) -> str:
        return "a path of the host"

    async def kill_and_reap(self, deadline: float) -> None:
        return


def _sandbox(directory: Path, code: int | None) -> LocalSandbox:
    _set_kills(directory, 0)
    endpoint = SocketEndpoint(directory / "guest.sock", b"")
    cgroup = Cgroup(1, {"memory": directory})
    return LocalSandbox("ab12", directory, endpoint, "", lambda _: None, cgroup=cgroup, process=Ended(code))


def _set_kills(directory: Path, count: int) -> None:
    (directory / "memory.oom_control").write_text(f"under_oom 0\noom_kill {count}\n")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (KILLED, "its first process was killed"),
        (1, "its first process ended with exit code 1"),
        (exit_codes.ORPHANED, "its supervisor heard nothing of a daemon for its orphan time"),
        (exit_codes.NO_INTERPRETER, "no interpreter starts in it any more"),
        (None, "its first process ended"),
    ],
)
async def test_the_cause_is_how_the_first_process_ended(tmp_path: Path, code: int | None, cause: str) -> None:
    assert await _sandbox(tmp_path, code).cause_of_death() == cause


@pytest.mark.parametrize("code", [KILLED, None])
async def test_a_kill_for_memory_that_was_not_reported_is_the_cause(tmp_path: Path, code: int | None) -> None:
    sandbox = _sandbox(tmp_path, code)
    _set_kills(tmp_path, 1)
    assert await sandbox.cause_of_death() == "the kernel killed it for its memory"


async def test_kills_for_memory_before_the_adoption_are_not_the_cause(tmp_path: Path) -> None:
    _set_kills(tmp_path, 2)
    process, cgroup = Ended(None), Cgroup(1, {"memory": tmp_path})
    endpoint = SocketEndpoint(tmp_path / "guest.sock", b"")
    sandbox = LocalSandbox("ab12", tmp_path, endpoint, "", lambda _: None, cgroup=cgroup, process=process)
    assert await sandbox.cause_of_death() == "its first process ended"


async def test_a_kill_for_memory_that_the_sandbox_survived_is_not_the_cause(tmp_path: Path) -> None:
    sandbox = _sandbox(tmp_path, KILLED)
    _set_kills(tmp_path, 1)
    assert await sandbox.oom_kills() == 1
    assert await sandbox.cause_of_death() == "its first process was killed"


async def test_a_sandbox_whose_creation_failed_has_no_cause(tmp_path: Path) -> None:
    sandbox = LocalSandbox("ab12", tmp_path, SocketEndpoint(tmp_path, b""), "", lambda _: None)
    assert await sandbox.cause_of_death() is None


async def test_a_sandbox_ends_with_a_whole_share_of_the_processors(tmp_path: Path) -> None:
    """With an idle one's part of a share, its processes waited seconds on a busy host until they could end."""
    weights: list[str] = []

    class Process(Ended):
        async def kill_and_reap(self, deadline: float) -> None:
            weights.append((tmp_path / "cpu.shares").read_text())
            (tmp_path / "cpu.shares").unlink()

    (tmp_path / "cpu.shares").write_text("3")
    endpoint = SocketEndpoint(tmp_path / "guest.sock", b"")
    cgroup = Cgroup(1, {"cpu": tmp_path})
    sandbox = LocalSandbox("ab12", tmp_path, endpoint, "", lambda _: None, cgroup=cgroup, process=Process(None))
    await sandbox.destroy()
    assert weights == ["1024"]
