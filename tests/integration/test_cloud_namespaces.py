"""Sandboxes that the guest makes inside of a machine of the cloud, seen by a program in them; the cloud is a double."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.e2b import E2BBackend, guests
from executor_server.backends.guest_archive import pack_guest
from executor_server.backends.settings import sandbox_environment
from executor_server.core.errors import SandboxFailure
from executor_server.sessions import Session
from tests.contract.harness import MIB, Harness, get_variables, set_variables
from tests.support.backends import require
from tests.support.fake_backend import SPEC
from tests.support.interpreters import TRIED, require_python

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")
from tests.support.e2b import Double, Template, e2b_section

PROCESSES = 24


@pytest.fixture
def directory() -> Iterator[Path]:
    require("e2b")
    made = Path(tempfile.mkdtemp(prefix="n-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def double(directory: Path) -> AsyncIterator[Double]:
    async with Double() as ready:
        yield ready


@pytest.fixture
async def harness(directory: Path, double: Double) -> AsyncIterator[Harness]:
    async with Harness(E2BBackend(directory, e2b_section(double))) as harness:
        yield harness


@pytest.fixture
async def session(harness: Harness) -> Session:
    return await harness.session(processes=PROCESSES, memory_bytes=256 * MIB, disk_bytes=8 * MIB)


async def ask(harness: Harness, session: Session, code: str) -> Any:
    answer = await harness.run(session, code)
    assert answer.outcome == "succeeded", (answer.outcome, answer.message, answer.stderr)
    return answer.output


@pytest.mark.parametrize("version", TRIED)
async def test_a_session_lives_in_the_namespaces_on_every_python(directory: Path, version: str) -> None:
    template = Template("old", python=require_python(version))
    async with (
        Double(templates=(template,)) as double,
        Harness(E2BBackend(directory, e2b_section(double, images={"base": "old"}))) as harness,
    ):
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
    assert (ids, groups) == ((guests.SANDBOX_UID,) * 6, [])
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
    assert await ask(harness, session, code) == (True, {str(guests.SANDBOX_UID)})


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
    assert "E2B_SANDBOX" not in variables, "one of the machine's own"
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    expected = {"PATH": path, **sandbox_environment(PROCESSES)}
    assert {name: variables.get(name) for name in expected} == expected


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
    harness: Harness, double: Double, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], reason: str
) -> None:
    config = guests._config
    monkeypatch.setattr(guests, "_config", lambda *args, **kwargs: {**config(*args, **kwargs), **changes})
    with pytest.raises(SandboxFailure) as failure:
        await harness.backend.create(SPEC)
    said = str(failure.value)
    assert "cannot make a sandbox here: " in said and reason in said and "\n" not in said.strip()
    assert double.sandboxes == {}


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


BUILD = """
import os, sys
from executor_server.guest.cloud.root_files import Sizes, build_root
build_root(sys.argv[1], "/etc/hostname", Sizes(MIB, MIB, 100))
assert os.statvfs("/opt/é x").f_flag & os.ST_RDONLY
""".replace("MIB", str(MIB))


def test_a_mount_of_the_machine_may_have_any_name(directory: Path) -> None:
    """Such a mount, covered with the ones above it by a user namespace, was searched for under another name."""
    mount = "mount -t tmpfs none /opt && mkdir '/opt/é x' && mount -t tmpfs none '/opt/é x'"
    enter = 'exec unshare --user --map-root-user --mount --pid --fork "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"{mount} && {enter}", "sh"]
    built = subprocess.run(
        [*command, sys.executable, "-c", BUILD, directory], capture_output=True, text=True, timeout=60
    )
    assert (built.returncode, built.stderr) == (0, "")
