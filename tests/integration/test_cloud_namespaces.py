"""Sandboxes that the guest makes inside of a machine of the cloud; this host is the machine, reached by a relay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.guest_archive import pack_guest
from executor_server.backends.settings import sandbox_environment
from executor_server.core.errors import SandboxFailure
from executor_server.guest.wire.messages import Shutdown
from executor_server.sessions import Session
from tests.contract.harness import MIB, Harness, get_variables, set_variables
from tests.support.fake_backend import SPEC
from tests.support.interpreters import require_python
from tests.support.nested import NestedBackend
from tests.support.polling import eventually_async

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces and mounts without a helper")

PROCESSES = 24


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="n-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def harness(directory: Path) -> AsyncIterator[Harness]:
    async with Harness(NestedBackend(directory, Path(sys.executable))) as harness:
        yield harness


@pytest.fixture
async def session(harness: Harness) -> Session:
    return await harness.session(processes=PROCESSES, memory_bytes=256 * MIB, disk_bytes=8 * MIB)


def nested(harness: Harness) -> NestedBackend:
    assert isinstance(harness.backend, NestedBackend)
    return harness.backend


async def ask(harness: Harness, session: Session, code: str) -> Any:
    answer = await harness.run(session, code)
    assert answer.outcome == "succeeded", (answer.outcome, answer.message, answer.stderr)
    return answer.output


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13"])
async def test_a_session_lives_in_the_namespaces_on_every_python(directory: Path, version: str) -> None:
    python = require_python(version)
    async with Harness(NestedBackend(directory, python)) as harness:
        session = await harness.session(prelude="from math import sqrt")
        assert session.python_version.startswith(f"{version}.")
        await set_variables(session, data=bytes(range(256)) * 8192)
        assert await ask(harness, session, "print('ü')\nlen(data) + sqrt(16)") == 2 * MIB + 4
        read, missing = await get_variables(session, "data", "nothing")
        assert (read["data"], missing) == (bytes(range(256)) * 8192, ("nothing",))
        assert (await harness.run(session, "while True:\n    pass", operations=1000)).outcome == "operation_limit"
        assert (await harness.run(session, "import os\nos._exit(3)")).state == "reset"
        tools = await harness.run_with_tools(session, "tool(20) + 2", {"tool": lambda n: n * 2})
        assert tools.output == 42


async def test_a_relay_that_breaks_is_replaced_and_nothing_is_lost(harness: Harness, session: Session) -> None:
    """It is killed while the program waits for an answer: the answer and later output use the next connection."""
    sandbox = nested(harness).sandboxes[-1]

    def tool(number: int) -> int:
        sandbox.relay_processes[-1].kill()
        return number

    code = "for number in range(4):\n    print(tool(number), 'x' * 50_000)\n'done'"
    answer = await harness.run_with_tools(session, code, {"tool": tool})
    assert (answer.outcome, answer.output) == ("succeeded", "done")
    assert answer.stdout == "".join(f"{number} {'x' * 50_000}\n" for number in range(4))
    assert len(sandbox.relay_processes) == 5


async def test_a_program_is_a_user_without_any_power(harness: Harness, session: Session) -> None:
    status, ids, groups = await ask(
        harness,
        session,
        """
import os
lines = open("/proc/self/status").read().splitlines()
(dict(line.split(":\\t", 1) for line in lines if ":\\t" in line), os.getresuid() + os.getresgid(), os.getgroups())
""",
    )
    assert (ids, groups) == ((nested(harness).sandboxes[-1].uid,) * 6, [])
    assert {int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


async def test_the_supervisor_can_neither_be_killed_nor_read(harness: Harness, session: Session) -> None:
    code = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
refusals = {}
def attempt(name, act):
    try:
        refusals[name] = act()
    except OSError as error:
        refusals[name] = type(error).__name__
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV):
    try:
        os.kill(1, number)
    except OSError:
        pass
attempt("mem", lambda: open("/proc/1/mem", "rb").close())
attempt("environ", lambda: open("/proc/1/environ", "rb").read())
attempt("fd", lambda: os.listdir("/proc/1/fd"))
attempt("root", lambda: os.listdir("/proc/1/root"))
attempt("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
attempt("pidfd_getfd", lambda: libc.syscall(438, os.pidfd_open(1), 3, 0))
refusals
"""
    refused = await ask(harness, session, code)
    assert refused == {
        **dict.fromkeys(("mem", "environ", "fd", "root"), "PermissionError"),
        "ptrace": -1,
        "pidfd_getfd": -1,
    }
    assert await ask(harness, session, "1 + 1") == 2


async def test_no_namespace_mount_or_user_can_be_made_or_gained(harness: Harness, session: Session) -> None:
    code = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(act):
    try:
        return act() == -1
    except OSError:
        return True
{
    "user namespace": refused(lambda: libc.unshare(0x10000000)),
    "mount": refused(lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
    "remount": refused(lambda: libc.mount(b"none", b"/", None, 0x1020, None)),
    "umount": refused(lambda: libc.umount2(b"/sys", 2)),
    "chroot": refused(lambda: libc.chroot(b"/tmp")),
    "setns": refused(lambda: libc.setns(os.open("/proc/self/ns/net", os.O_RDONLY), 0)),
    "root": refused(lambda: os.setresuid(0, 0, 0)),
    "hostname": refused(lambda: socket.sethostname("other")),
    "device": refused(lambda: os.mknod("/tmp/device", 0o60666, os.makedev(254, 0))),
    "raw socket": refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()),
}
"""
    answers = await ask(harness, session, code)
    assert all(answers.values()), answers


async def test_a_setuid_program_gains_nothing(harness: Harness, session: Session) -> None:
    """Machines of the cloud have such a program: sudo without a password."""
    places = ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount")
    program = next((place for place in places if Path(place).is_file() and Path(place).stat().st_mode & 0o4000), None)
    if program is None:
        pytest.skip("this machine has no setuid program")
    code = f"""
import os, subprocess, time
child = subprocess.Popen([{program!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
os.kill(child.pid, 19)
uids = [line.split()[1:] for line in open(f"/proc/{{child.pid}}/status") if line.startswith("Uid:")][0]
child.kill()
child.communicate()
(os.statvfs({program!r}).f_flag & os.ST_NOSUID != 0, set(uids))
"""
    assert await ask(harness, session, code) == (True, {str(nested(harness).sandboxes[-1].uid)})


async def test_the_machine_s_own_services_are_out_of_reach(harness: Harness, session: Session) -> None:
    """The cloud's agent accepts requests on localhost."""
    with socket.create_server(("127.0.0.1", 0)) as service, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0executor-test-service")
        abstract.listen()
        code = f"""
import errno, socket
with socket.socket() as inet, socket.socket(socket.AF_UNIX) as unix, socket.create_server(("127.0.0.1", 0)) as own:
    tried = [errno.errorcode[each] for each in (
        inet.connect_ex(("127.0.0.1", {service.getsockname()[1]})),
        unix.connect_ex("\\0executor-test-service"))]
    with socket.create_connection(own.getsockname()):
        pass
with socket.socket() as away:
    tried.append(errno.errorcode[away.connect_ex(("192.0.2.1", 80))])
(tried, [name for _, name in socket.if_nameindex()], socket.gethostname())
"""
        answer = await ask(harness, session, code)
    assert answer == (["ECONNREFUSED", "ECONNREFUSED", "ENETUNREACH"], ["lo"], "sandbox")


async def test_only_three_directories_can_be_written_to(harness: Harness, session: Session) -> None:
    code = """
import os
found = []
for directory, names, _ in os.walk("/"):
    names[:] = [name for name in names if not os.path.islink(os.path.join(directory, name))] if directory.count("/") < 3 else []
    if directory == "/":
        names.remove("proc")
    try:
        open(os.path.join(directory, "probe"), "x").close()
    except OSError:
        continue
    found.append(directory)
    os.unlink(os.path.join(directory, "probe"))
for path in ("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/dev/null/x", "/run/executor/guest.pyz"):
    try:
        open(path, "r+").close()
    except OSError:
        continue
    found.append(path)
found
"""
    found = await ask(harness, session, code)
    same = ["/var/tmp", "/var/tmp/.config"]  # /tmp, seen less deep
    assert sorted(found) == ["/dev/shm", "/tmp", "/tmp/.config", "/tmp/.config/git", *same, "/workspace"]


async def test_only_the_machine_s_system_is_visible(harness: Harness, session: Session) -> None:
    code = """
import os
{
    "run": sorted(os.listdir("/run")), "ours": sorted(os.listdir("/run/executor")), "sys": os.listdir("/sys"),
    "devices": sorted(os.listdir("/dev")), "tmp": os.listdir("/tmp"), "root": os.path.exists("/root/.bashrc"),
    "files": [name for name in os.listdir("/") if os.path.isfile("/" + name)],
    "first": sorted(int(name) for name in os.listdir("/proc") if name.isdigit())[0], "variables": dict(os.environ),
    "interrupts": open("/proc/interrupts").read(),
    "descriptors": [os.readlink(f"/proc/self/fd/{name}") for name in ("0", "1", "2")],
}
"""
    seen = await ask(harness, session, code)
    variables = seen.pop("variables")
    assert seen.pop("devices") == sorted(
        ["fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
    )
    assert all(name.startswith(("/dev/null", "pipe:")) for name in seen.pop("descriptors"))
    assert (seen.pop("run"), seen.pop("ours")) == (["executor"], ["guest.pyz", "hosts"])
    # git's default author is there; an environment below /tmp is shown there, too.
    assert ".config" in seen["tmp"]
    seen["tmp"].remove(".config")
    below_tmp = [Path(sys.prefix).parts[2]] if Path(sys.prefix).is_relative_to("/tmp") else []
    assert seen == {"sys": [], "tmp": below_tmp, "root": False, "files": [], "first": 1, "interrupts": ""}
    assert "CLOUD_SECRET" not in variables
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    expected = {"PATH": path, **sandbox_environment(PROCESSES)}
    assert {name: variables.get(name) for name in expected} == expected


async def test_disk_processes_memory_and_time_are_limited(harness: Harness, session: Session) -> None:
    filled = await ask(
        harness,
        session,
        f"""
import errno
written = []
for place in ("/workspace", "/tmp", "/dev/shm"):
    size = 0
    try:
        with open(f"{{place}}/file", "wb", buffering=0) as file, open(f"{{place}}/other", "wb", buffering=0) as other:
            for _ in range(64):
                size += (file if size < {4 * MIB} else other).write(bytes({MIB}))
    except OSError as error:
        written.append((size <= {8 * MIB}, errno.errorcode[error.errno]))
import os
for place in ("/workspace", "/tmp", "/dev/shm"):
    os.unlink(f"{{place}}/file"), os.unlink(f"{{place}}/other")
written
""",
    )
    assert filled == [(True, "ENOSPC")] * 3
    bomb = """
import os, signal, time
children = []
try:
    while len(children) < 1000:
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(1e6)
except OSError as error:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
len(children)
"""
    children = await ask(harness, session, bomb)
    assert 0 < children < PROCESSES
    grown = await harness.run(session, "kept = []\nwhile True:\n    kept.append(bytearray(10**6))")
    assert grown.outcome == "out_of_memory"
    hungry = await harness.run(
        session,
        "del kept\nimport os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        kept = b'x' * (100 * 2**20)\n        time.sleep(1e6)\ntime.sleep(1e6)",
        wall_time_s=15.0,
    )
    assert hungry.outcome == "out_of_memory"
    assert (await harness.run(session, "import time\ntime.sleep(1e6)", wall_time_s=0.3)).outcome == "timeout"
    assert (await harness.run(session, "while True: pass", cpu_time_s=0.3)).outcome == "cpu_limit"
    assert await ask(harness, session, "1 + 1") == 2


async def test_files_count_as_memory_because_they_are(harness: Harness) -> None:
    """Together they would exceed the machine's memory, and its kernel would choose the process to kill."""
    session = await harness.session(memory_bytes=192 * MIB, disk_bytes=128 * MIB)
    code = f"open('file', 'wb').write(bytes({100 * MIB}))"
    assert await ask(harness, session, code) == 100 * MIB
    assert await ask(harness, session, f"len(bytes({40 * MIB}))") == 40 * MIB
    both = await harness.run(session, f"import time\nkept = b'x' * {110 * MIB}\ntime.sleep(1e6)", wall_time_s=15.0)
    assert both.outcome == "out_of_memory"
    assert await ask(harness, session, "import os\nos.path.getsize('file')") == 100 * MIB


# Each fills 300 MiB that no process has in its tables afterwards, under a limit of 192.
HIDDEN = {
    "memory files": """
import os
for _ in range(30):
    fd = os.memfd_create("x")
    os.write(fd, bytes(10 * 2**20))
""",
    "System V segments": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(30):
    segment = libc.shmget(0, 10 * 2**20, 0o1600)
    assert segment >= 0
    where = libc.shmat(segment, None, 0)
    ctypes.memset(where, 1, 10 * 2**20)
    libc.shmdt(where)
""",
    "shared mappings": """
import mmap, os
shared = mmap.mmap(-1, 300 * 2**20)
if os.fork() == 0:
    for _ in range(300):
        shared.write(bytes(2**20))
    os._exit(0)
os.wait()
""",
}


@pytest.mark.parametrize("what", HIDDEN)
async def test_memory_that_no_process_has_mapped_counts(harness: Harness, what: str) -> None:
    """A program could fill the machine with it, whatever its limit was."""
    session = await harness.session(memory_bytes=192 * MIB, disk_bytes=64 * MIB)
    run = await harness.run(session, f"{HIDDEN[what]}\nimport time\ntime.sleep(1e6)", wall_time_s=15.0)
    assert run.outcome == "out_of_memory", run.ended
    assert await ask(harness, session, "1 + 1") == 2


async def test_a_killed_guest_ends_its_sandbox(harness: Harness, session: Session) -> None:
    sandbox = nested(harness).sandboxes[-1]
    supervisor = sandbox.supervisor
    assert supervisor is not None
    assert await ask(harness, session, "1 + 1") == 2
    inside = supervisor.children(recursive=True)
    assert inside
    supervisor.kill()
    await asyncio.to_thread(supervisor.wait, 10)
    assert not any(process.is_running() for process in inside)
    result = await harness.run(session, "1 + 1")
    assert result.outcome == "lost"


async def test_repeating_the_command_starts_nothing_twice(directory: Path) -> None:
    backend = NestedBackend(directory, Path(sys.executable))
    sandbox = backend.new_sandbox()
    config = backend.config(sandbox, SPEC)
    answers = await asyncio.gather(*(backend.run_start(config) for _ in range(3)))
    assert answers == [(0, "")] * 3
    first = sandbox.supervisor
    assert first is not None
    first.kill()
    first.wait(10)
    exit_code, said = await backend.run_start(config)
    assert (exit_code, sandbox.supervisor) == (1, None)
    assert said == "cannot make a sandbox here: there was one before, and its guest does not listen\n"


def mounted() -> set[str]:
    """Returns the mounts of this host, without those of an Engine's containers, which come and go."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if not re.search("/(overlay2|docker|netns|volumes)/", line)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seccomp": "AAAA"}, "cannot filter its system calls: a filter of 3 bytes"),
        ({"disk_bytes": -1}, "cannot put its files together: [Errno 22] Invalid argument"),
        ({"uid": 0}, "the user must be an ordinary one"),
        ({"gid": -1}, "the user must be an ordinary one"),
        ({"seccomp": "A"}, "its configuration is wrong: "),
        ({"environment": {"A=B": "C\0"}}, "cannot run "),
        ({"socket": "/proc/nowhere/sandbox/guest.sock"}, "no directory /proc/nowhere/sandbox: "),
    ],
)
async def test_a_failed_start_reports_the_reason_and_leaves_nothing(
    directory: Path, changes: dict[str, object], reason: str
) -> None:
    backend = NestedBackend(directory, Path(sys.executable), **changes)
    mounts = mounted()
    with pytest.raises(SandboxFailure) as failure:
        await backend.create(SPEC)
    said = str(failure.value)
    assert said.startswith("cannot make a sandbox here: ") and reason in said and said.count("\n") == 1
    assert list(directory.glob("guests/*")) == []
    assert mounted() == mounts


def test_a_start_by_another_user_than_root_is_refused(directory: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(pack_guest(directory).path)!r})
from executor_guest.cloud.namespaces import main
os.setuid(65533)
sys.exit(main(["{{}}"]))
"""
    ended = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "cannot make a sandbox here: it must be started by root\n"


async def test_a_start_that_is_killed_halfway_leaves_no_sandbox(directory: Path) -> None:
    """A guest that was started by then finds that no daemon connects, and ends."""
    backend = NestedBackend(directory, Path(sys.executable))
    outcomes, sandboxes = set(), []
    for kill_after_ms in range(0, 120, 5):
        sandbox = backend.new_sandbox()
        sandboxes.append(sandbox)
        config = backend.config(sandbox, replace(SPEC, orphan_time_s=0.5))
        command = await asyncio.create_subprocess_exec(*backend.start_command(config), stderr=subprocess.DEVNULL)
        try:
            await asyncio.wait_for(command.wait(), kill_after_ms / 1000)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):  # it ended in that moment
                command.kill()
        outcomes.add(await command.wait())
        exit_code, said = await backend.run_start(config)  # as the daemon does, which has lost the answer
        assert exit_code == 0 or said.endswith("there was one before, and its guest does not listen\n")
    assert -9 in outcomes
    assert await eventually_async(lambda: all(sandbox.supervisor is None for sandbox in sandboxes))


async def test_a_guest_ends_its_sandbox_on_request(harness: Harness, session: Session) -> None:
    sandbox = nested(harness).sandboxes[-1]
    supervisor = sandbox.supervisor
    assert supervisor is not None
    session._channel.send(Shutdown())
    await asyncio.to_thread(supervisor.wait, 10)
    assert sandbox.supervisor is None
