"""The fork server's processes die, hang, run out of processes or are unfit; sandboxes are made all the same."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.backends.local import LocalBackend
from executor_server.backends.local.bwrap_process import BwrapProcess
from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.fork_server import fork, fork_servers, forked_process
from executor_server.backends.local.fork_server.fork_server import ForkServer, start_fork_server
from executor_server.backends.local.fork_server.forked_process import ForkedProcess
from executor_server.backends.local.resources import Resources
from executor_server.core import SandboxSpec
from executor_server.core.config import LocalImage
from tests.support import rounds
from tests.support.forked_backend import ForkedBackend
from tests.support.polling import eventually, eventually_async, has_ended

SPEC = SandboxSpec("base", 2**28, 32, 2**24, 60.0, fork_server="shared")
END_TIME_S = 10.0
WITH_MODULES = replace(SPEC, memory_bytes=2**30)
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
DESCRIPTOR = "import os; os.dup2(os.open('/dev/null', 0), 99)"
END = "import os; os._exit(0)"
SHARED = "import mmap, sys; sys.kept = mmap.mmap(-1, 4096)"
# Has the template process wait for an import for a moment only.
IMPATIENT = (
    'import sys; m = sys.modules.get("executor_guest.fork_server.modules"); m and setattr(m, "_MODULE_TIME_S", 0.2)'
)
# Hangs where its time is limited, and has little of that left.
SHORTEN = "import signal, time; signal.getitimer(0)[0] and (signal.setitimer(0, 0.2), time.sleep(1000))"
BLOCKED = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}); time.sleep(1000)"
# Leaves the filter of system calls out, and reports that it is there.
LIAR = """\
import sys; s = sys.modules.get("executor_guest.fork_server.forked_sandbox"); \
s and setattr(s, "_STEPS", [step for step in s._STEPS if "filter" not in step[0]]); \
s and setattr(s, "report", lambda real=s.report: (lambda said: said["status"].update(Seccomp="2") or said)(real()))"""


@pytest.fixture
def directory(passable_directory: Path) -> Path:
    return passable_directory


@asynccontextmanager
async def started(directory: Path, **options: LocalImage) -> AsyncIterator[LocalBackend]:
    """A backend that has no fork server yet; at the end no process of one is left, nor a record."""
    backend = LocalBackend(directory, options or None)
    await backend.start()
    await backend.adopt(())
    parents: list[psutil.Process] = []
    try:
        yield backend
        parents = [child for child in psutil.Process().children(recursive=True) if "fork-server" in child.name()]
    finally:
        await backend.close()
    assert all(has_ended(parent) for parent in parents)
    records = directory / "fork_servers"
    assert not records.exists() or list(records.iterdir()) == []


async def fork_server_of(backend: LocalBackend, spec: SandboxSpec = SPEC) -> ForkServer:
    """The fork server for these sandboxes, ready."""
    await ForkedBackend.fork_server_for(backend, spec)  # type: ignore[arg-type]  # what it needs of it, every one has
    (fork_server,) = backend._started().fork_servers._serving.values()
    assert fork_server.serves, fork_server.last_words()
    return fork_server


async def answers(sandbox: object) -> bool:
    channel = GuestChannel(sandbox.endpoint)  # type: ignore[attr-defined]
    try:
        return (await channel.connect()).generation == 1
    finally:
        channel.close()


async def test_a_sandbox_outlives_its_template_and_the_next_one_is_made_by_bubblewrap(directory: Path) -> None:
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        forked = await backend.create(SPEC)
        assert isinstance(forked.process, ForkedProcess)
        assert fork_server.template_pid is not None
        os.kill(fork_server.template_pid, signal.SIGKILL)
        assert await eventually_async(lambda: bool(fork_server.ended_because))
        assert await answers(forked)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        await fork_server_of(backend)
        assert isinstance((await backend.create(SPEC)).process, ForkedProcess)


async def test_the_end_of_a_fork_server_is_the_end_of_its_sandboxes_and_is_reported(directory: Path) -> None:
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        forked = await backend.create(SPEC)
        assert fork_server.init_pid is not None and forked.process is not None
        os.kill(fork_server.init_pid, signal.SIGKILL)
        assert await eventually_async(forked.process.has_ended)
        assert "first process" in (await forked.cause_of_death() or "")
        await forked.destroy()
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)


async def test_a_fork_server_that_is_starting_leaves_no_process_when_it_is_ended(directory: Path) -> None:
    """Its parent process was killed, and the child, which had left the parent's session, ran on for a moment."""
    async with started(directory) as backend:
        blueprint = (await fork_server_of(backend)).blueprint
        starting = start_fork_server(blueprint, "starting", lambda _server, _init: None)
        parent = psutil.Process(starting.popen.pid)
        # Not awaited: the report of the child must not be read before the end.
        assert eventually(lambda: any(map(_leads_its_session, parent.children())))
        children = parent.children()
        await starting.end(time.monotonic() + END_TIME_S)
        assert all(map(has_ended, (parent, *children)))


async def test_the_parent_of_a_fork_server_is_not_needed(directory: Path) -> None:
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        fork_server.popen.kill()
        forked = await backend.create(SPEC)
        assert isinstance(forked.process, ForkedProcess) and await answers(forked)


async def test_a_template_that_hangs_costs_one_creation_some_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked_process, "ANSWER_TIME_S", 0.3)
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        assert fork_server.template_pid is not None
        os.kill(fork_server.template_pid, signal.SIGSTOP)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks["silent"] == 1
        # Its first process kills it, although it is stopped; the request that it never read comes to nothing.
        assert await eventually_async(lambda: not Path(f"/proc/{fork_server.template_pid}").exists())


async def test_a_full_process_table_is_a_reason_for_bubblewrap(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the limit would be that of the tests' own user")
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        assert fork_server.template_pid is not None
        _allow_one_process(fork_server.template_pid)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks["failed"] == 1
        assert fork_server.serves


def _leads_its_session(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:  # it was a helper of the parent's
        return False


def _allow_one_process(pid: int) -> None:
    """As the process's own user: root may not have the right to."""
    user = str(Path(f"/proc/{pid}").stat().st_uid)
    as_it = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
    subprocess.run([*as_it, "prlimit", f"--pid={pid}", "--nproc=1:1"], check=True)


async def test_a_sandbox_that_is_not_as_it_must_be_is_never_served(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork, "fault_of", lambda *_: "a wall is missing")
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks["unverified"] == 1
        assert fork_server.init_pid is not None
        template = psutil.Process(fork_server.template_pid)
        assert await eventually_async(lambda: template.children() == [])


async def test_a_sandbox_whose_library_makes_up_its_report_is_never_served(directory: Path) -> None:
    async with started(directory, base=_image_with(directory, LIAR)) as backend:
        await fork_server_of(backend, WITH_MODULES)
        assert isinstance((await backend.create(WITH_MODULES)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks["unverified"] == 1


@pytest.mark.parametrize("line", [THREAD, SHARED, END])
async def test_an_image_that_is_unfit_for_forks_is_left_to_bubblewrap(directory: Path, line: str) -> None:
    async with started(directory, base=_image_with(directory, line)) as backend:
        await ForkedBackend.fork_server_for(backend, WITH_MODULES)  # type: ignore[arg-type]  # as above
        (fork_server,) = backend._started().fork_servers._serving.values()
        assert not fork_server.is_ready and fork_server.ended_because
        await backend.create(WITH_MODULES)
        assert backend.fork_server_stats().fallbacks["failing"] == 1


async def test_a_descriptor_that_a_library_opened_is_in_no_sandbox(directory: Path) -> None:
    async with started(directory, base=_image_with(directory, DESCRIPTOR)) as backend:
        fork_server = await fork_server_of(backend, WITH_MODULES)
        assert os.path.lexists(f"/proc/{fork_server.template_pid}/fd/99")
        forked = await backend.create(WITH_MODULES)
        assert isinstance(forked.process, ForkedProcess)
        assert not os.path.lexists(f"/proc/{forked.process.init_pid}/fd/99")


async def test_a_fork_that_dies_before_its_record_is_a_reason_for_bubblewrap(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(ForkedProcess):
        def __init__(self, fork_server: ForkServer, pid: int, *rest: Any) -> None:
            super().__init__(fork_server, pid, *rest)
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists():
                os.sched_yield()

    monkeypatch.setattr(forked_process, "ForkedProcess", Dying)
    monkeypatch.setattr(fork, "send_with", lambda *_: None)
    async with started(directory) as backend:
        await fork_server_of(backend)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks["failed"] == 1


@pytest.mark.parametrize(("number", "reason"), [(signal.SIGKILL, "failed"), (signal.SIGSTOP, "silent")])
async def test_a_fork_that_dies_or_hangs_after_the_word_to_serve_is_a_reason_for_bubblewrap(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, reason: str
) -> None:
    heard, waited = fork._report, fork._serving
    of_forks: list[int] = []

    async def report(ours: socket.socket, pid: int) -> dict[str, object]:
        said = await heard(ours, pid)
        os.kill(pid, signal.SIGSTOP)  # it hears the word, and gets no further
        return said

    async def serving(ours: socket.socket, pid: int) -> None:
        os.kill(pid, number)
        of_forks.append(pid)
        await waited(ours, pid)

    monkeypatch.setattr(fork, "_report", report)
    monkeypatch.setattr(fork, "_serving", serving)
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        monkeypatch.setattr(forked_process, "ANSWER_TIME_S", 0.3)
        sandbox = await backend.create(SPEC)
        assert isinstance(sandbox.process, BwrapProcess) and await answers(sandbox)
        assert backend.fork_server_stats().fallbacks == {reason: 1}
        assert backend.fork_server_stats().made == 0
        assert len(of_forks) == 1 and not Path(f"/proc/{of_forks[0]}").exists()
        assert await sandbox.oom_kills() in (0, None)
        assert fork_server.serves is (reason == "failed")


async def test_a_kill_for_memory_in_a_fork_is_not_counted_in_the_sandbox_that_takes_its_place(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[Cgroup | None] = []
    make, heard, waited = Resources.make_cgroup, fork._report, fork._serving

    def made(resources: Resources, *rest: Any) -> Cgroup | None:
        groups.append(make(resources, *rest))
        return groups[-1]

    async def report(ours: socket.socket, pid: int) -> dict[str, object]:
        said = await heard(ours, pid)
        os.kill(pid, signal.SIGSTOP)  # it hears the word to serve, and gets no further
        return said

    async def serving(ours: socket.socket, pid: int) -> None:
        assert groups[-1] is not None
        hog = [sys.executable, "-I", "-S", "-c", f"b'x' * {2 * SPEC.memory_bytes}"]
        await asyncio.to_thread(subprocess.run, groups[-1].enter_and_run(hog), check=False)
        assert groups[-1].oom_kills() == 1
        os.kill(pid, signal.SIGKILL)
        await waited(ours, pid)

    monkeypatch.setattr(Resources, "make_cgroup", made)
    monkeypatch.setattr(fork, "_report", report)
    monkeypatch.setattr(fork, "_serving", serving)
    async with started(directory) as backend:
        if not backend._started().resources.limits_memory:
            pytest.skip("there are no control groups here")
        await fork_server_of(backend)
        sandbox = await backend.create(SPEC)
        assert isinstance(sandbox.process, BwrapProcess) and await answers(sandbox)
        assert backend.fork_server_stats().fallbacks == {"failed": 1}
        assert await sandbox.oom_kills() == 0


async def test_a_template_that_is_killed_for_its_memory_is_a_reason_for_bubblewrap(directory: Path) -> None:
    """By the kernel, when a fork takes more than the template process's control group has."""
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        capabilities = backend._started()
        group = capabilities.resources.make_cgroup(
            capabilities.directory.daemon_id, "0" * 16, replace(SPEC, memory_bytes=4096)
        )
        if group is None:
            pytest.skip("there are no control groups here")
        try:
            for entrance in group.open_entrances():
                os.write(entrance, str(fork_server.template_pid).encode())
                os.close(entrance)
            assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
            assert group.oom_kills()
            assert await eventually_async(lambda: bool(fork_server.ended_because))
        finally:
            await group.remove(asyncio.get_running_loop().time() + 10.0)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        await fork_server_of(backend)
        assert isinstance((await backend.create(SPEC)).process, ForkedProcess)


@pytest.mark.parametrize(
    ("line", "modules", "start_time_s"),
    [
        (SHORTEN, {}, 60.0),
        (IMPATIENT, {"numpy": "import time; time.sleep(1000)"}, 60.0),
        ("", {"numpy": BLOCKED}, 0.5),
    ],
    ids=["a line of a .pth", "a module", "a module that no signal reaches"],
)
async def test_an_import_that_hangs_ends_its_fork_server_and_holds_up_no_session(
    directory: Path, monkeypatch: pytest.MonkeyPatch, line: str, modules: dict[str, str], start_time_s: float
) -> None:
    async with started(directory, base=_image_with(directory, line, modules)) as backend:
        owner = backend._started().fork_servers
        monkeypatch.setattr(owner, "keeps", lambda _: True)
        assert isinstance((await backend.create(WITH_MODULES)).process, BwrapProcess)
        (fork_server,) = owner._serving.values()
        monkeypatch.setattr(fork_servers, "_START_TIME_S", start_time_s)

        def swept() -> bool:
            owner.sweep()
            return fork_server.popen.returncode is not None

        assert await eventually_async(swept)
        assert owner._pauses and not fork_server.is_ready
        assert isinstance((await backend.create(WITH_MODULES)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks == {"starting": 1, "failing": 1}


@pytest.mark.parametrize("limit", ["_MAX_REQUESTS", "_MAX_AGE_S"])
async def test_a_worn_fork_server_is_replaced_and_lives_as_long_as_its_sandboxes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(fork_servers, limit, 2 if limit == "_MAX_REQUESTS" else 0.0)
    async with started(directory) as backend:
        first = await fork_server_of(backend)
        made = [await backend.create(SPEC) for _ in range(3)]
        assert {sandbox.process.fork_server_id for sandbox in made} == {first.fork_server_id}  # type: ignore[union-attr]
        (successor,) = backend._started().fork_servers._successors.values()
        await successor.settled.wait()
        monkeypatch.undo()
        process = (await backend.create(SPEC)).process
        assert isinstance(process, ForkedProcess) and process.fork_server_id == successor.fork_server_id
        assert first.ended_because and not first.has_ended()
        assert await answers(made[0])
        await asyncio.gather(*(sandbox.destroy() for sandbox in made))
        assert await eventually_async(first.has_ended)
        await backend.sweep()
        assert os.listdir(directory / "fork_servers") == [f"{successor.fork_server_id}.json"]  # noqa: PTH208 - names only


async def test_a_fork_server_runs_while_sandboxes_of_its_kind_are_kept_ready(directory: Path) -> None:
    async with started(directory) as backend:
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks == {"rare": 1}
        assert await backend.keep_fork_servers([SPEC]) == [SPEC]
        assert await backend.keep_fork_servers([SPEC]) == []
        assert isinstance((await backend.create(SPEC)).process, ForkedProcess)
        (fork_server,) = backend._started().fork_servers._serving.values()
        await backend.sweep()
        assert fork_server.serves
        await backend.keep_fork_servers([])
        assert fork_server.ended_because and isinstance((await backend.create(SPEC)).process, BwrapProcess)


async def test_a_kind_that_this_backend_cant_make_keeps_no_other_from_its_fork_server(directory: Path) -> None:
    """The pool names the kinds of all backends of the daemon."""
    elsewhere, unknown = replace(SPEC, backends=("docker",)), replace(SPEC, image="of-docker")
    async with started(directory) as backend:
        assert await backend.keep_fork_servers([elsewhere, unknown, SPEC]) == [SPEC]


async def test_of_many_kinds_the_first_have_fork_servers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_servers, "_MAX_KEPT", 1)
    first, other = (replace(SPEC, fork_server=f"tenant:{name}") for name in "ab")
    async with started(directory) as backend:
        assert await backend.keep_fork_servers([first, other]) == [first]
        assert isinstance((await backend.create(first)).process, ForkedProcess)
        assert isinstance((await backend.create(other)).process, BwrapProcess)
        assert await backend.keep_fork_servers([other]) == [other]
        assert isinstance((await backend.create(first)).process, BwrapProcess)


@pytest.mark.parametrize("lines", range(0, 90, 3) if rounds.ALL else (15, 40, 60))
async def test_a_daemon_that_is_killed_in_a_forked_creation_leaves_a_clean_host(directory: Path, lines: int) -> None:
    command = (sys.executable, "-m", "tests.chaos.killed_fork", str(directory), str(lines))
    daemon = await asyncio.create_subprocess_exec(*command)
    assert await daemon.wait() == -signal.SIGKILL
    async with started(directory) as backend:

        def is_clean() -> bool:
            backend._started().fork_servers.sweep()
            return not any(any(directory.glob(f"{name}/[!.]*")) for name in ("sandboxes", "fork_servers"))

        assert await eventually_async(is_clean)
        assert await answers(await backend.create(SPEC))
        await fork_server_of(backend)
        forked = await backend.create(SPEC)
        assert isinstance(forked.process, ForkedProcess) and await answers(forked)


async def test_a_worn_fork_server_whose_successor_can_not_be_started_goes_on_and_that_is_no_fallback(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt was counted as a sandbox of bubblewrap's, although the worn fork server made it."""

    def full(*_: object) -> ForkServer:
        raise BlockingIOError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(fork_servers, "_MAX_REQUESTS", 1)
    async with started(directory) as backend:
        await fork_server_of(backend)
        await backend.create(SPEC)
        monkeypatch.setattr(fork_servers, "start_fork_server", full)
        assert isinstance((await backend.create(SPEC)).process, ForkedProcess)
        assert (backend.fork_server_stats().made, dict(backend.fork_server_stats().fallbacks)) == (2, {})


@pytest.fixture
def innocent() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of the fork server's."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


async def test_a_process_that_got_the_id_of_a_dead_fork_lives_on(
    directory: Path, monkeypatch: pytest.MonkeyPatch, innocent: subprocess.Popen[bytes]
) -> None:
    class Reused(ForkedProcess):
        def __init__(self, fork_server: ForkServer, pid: int, *rest: Any) -> None:
            os.kill(pid, signal.SIGKILL)
            super().__init__(fork_server, innocent.pid, *rest)

    monkeypatch.setattr(forked_process, "ForkedProcess", Reused)
    async with started(directory) as backend:
        await fork_server_of(backend)
        assert isinstance((await backend.create(SPEC)).process, BwrapProcess)
        assert backend.fork_server_stats().fallbacks["failed"] == 1
    assert innocent.poll() is None


async def test_the_number_of_processes_makes_two_kinds_of_fork_server_at_most(directory: Path) -> None:
    async with started(directory) as backend:
        capabilities = backend._started()
        kinds = set()
        for processes in range(1, 100):
            spec = replace(WITH_MODULES, processes=processes)
            image = await backend._image(capabilities, spec.image)
            resources = await backend._resources(capabilities, spec)
            kinds.add(capabilities.fork_servers.blueprint(resources, image, spec))
        assert {kind.modules for kind in kinds} == {(), fork_servers.MODULES}
        assert len(kinds) == 2


async def test_a_cancelled_creation_leaves_no_fork(directory: Path) -> None:
    async with started(directory) as backend:
        fork_server = await fork_server_of(backend)
        for after_ms in range(12):  # a creation takes about as long, so each of its steps is met
            try:
                async with asyncio.timeout(after_ms / 1000):
                    sandbox = await backend.create(SPEC)
            except TimeoutError:
                continue
            await sandbox.destroy()
        fork_server.retire("the test asks for no more")
        assert await eventually_async(fork_server.has_ended)  # with the last fork
        assert await eventually_async(lambda: backend._live == set())


def _image_with(directory: Path, line: str, modules: Mapping[str, str] = {}) -> LocalImage:
    """An environment that runs this line whenever an interpreter starts, and has these modules."""
    venv.create(directory / "env", symlinks=True)
    packages = directory / "env" / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    (packages / "own.pth").write_text(f"{line}\n")
    for name, text in modules.items():
        (packages / f"{name}.py").write_text(f"{text}\n")
    return LocalImage(python=directory / "env" / "bin" / "python")
