"""Code in a sandbox of the local backend tries to see and do what it must not; under root's and a user's daemon.

The programs run in real sandboxes, one each, confined as the guest is. Where a program could fail for a reason that has
nothing to do with the sandbox, the same program run on the host shows that it would succeed there.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends import syscalls
from executor_server.guest.wire import rlimits
from tests.security.local_trials import DISK_BYTES, HOST_UID, PROCESSES
from tests.support.backends import require

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
SECRET = "EXECUTOR_TEST_SECRET"
NUMBERS = {"x86_64": syscalls.X86_64, "aarch64": syscalls.AARCH64}[platform.machine()]
CLONE_NEWUSER, SIGCHLD = 0x10000000, 17
MiB = 2**20

_SHOW = "import json; show = lambda value: print(json.dumps(value))\n"

_SYSTEM_CALLS = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(number, *(ctypes.c_long(argument) for argument in (*arguments, *[0] * 6)[:6]))
    return ctypes.get_errno()
results = {{name: call(number) for name, number in { ({name: NUMBERS[name] for name in sorted(syscalls.REFUSED & set(NUMBERS))})!r}.items()}}
results["clone into a user namespace"] = call({NUMBERS["clone"]}, {CLONE_NEWUSER | SIGCHLD})
results["clone3"] = call({NUMBERS["clone3"]})
results["unknown"] = call(999)
show(results)
"""

PROGRAMS = {
    "status": """
status = dict(line.rstrip().partition(":\\t")[::2] for line in open("/proc/self/status"))
import os
maps = {line.split()[0]: int(line.split()[1]) for line in open("/proc/self/uid_map")}
show([status, os.getresuid(), os.getgroups(), maps])
""",
    "regain": """
import os
results = {}
for name, act in {"uid": lambda: os.setresuid(0, 0, 0), "gid": lambda: os.setresgid(0, 0, 0),
                  "groups": lambda: os.setgroups([0])}.items():
    try:
        act()
        results[name] = "done"
    except OSError:  # EPERM, or EINVAL where there is no user 0 at all
        results[name] = "refused"
show(results)
""",
    "writable": """
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
for path in ("/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/1/oom_score_adj" if os.getpid() != 1 else "/etc/passwd"):
    try:
        open(path, "w").close()
    except OSError:
        continue
    found.append(path)
show(found)
""",
    "host files": f"""
import os
homes = [f"/home/{{name}}" for name in os.listdir("/home") if os.readlink("/home/user") == "/workspace" and name != "user"]
show([path for path in (*homes, "/etc/shadow", "/var/lib", "/var/log", "/sys", "/boot", "/etc/ssl/private", "/root/.bashrc", "/root/.ssh",
    "/proc/1/root/etc/shadow", {str(REPOSITORY / "pyproject.toml")!r}, "/run/docker.sock") if os.path.exists(path)])
""",
    "devices": "import os; show(os.listdir('/dev'))",
    "processes": "import os; show([name for name in os.listdir('/proc') if name.isdigit()])",
    "environment": "import os; show([dict(os.environ), sorted(os.listdir('/proc/self/fd'))])",
    "network": """
import errno, socket
interfaces = [name for _, name in socket.if_nameindex()]
with socket.socket() as probe:
    refusal = errno.errorcode[probe.connect_ex(("192.0.2.1", 80))]
show([interfaces, refusal, open("/proc/net/unix").read().count("@")])
""",
    "families": """
import errno, socket
results = {}
for name, family, kind, protocol in (("packet", 17, 3, 0), ("vsock", 40, 1, 0), ("alg", 38, 5, 0), ("bluetooth", 31, 3, 1),
    ("netlink audit", 16, 3, 9), ("netlink route", 16, 3, 0), ("unix", 1, 1, 0), ("inet", 2, 1, 0)):
    try:
        socket.socket(family, kind, protocol).close()
        results[name] = "open"
    except OSError as error:
        results[name] = errno.errorcode[error.errno]
show(results)
""",
    "system calls": _SYSTEM_CALLS,
    "terminal": """
import errno, fcntl
results = []
for request in (0x5412, 0x541C, 0x5412 | 1 << 32, 0x5413):
    try:
        fcntl.ioctl(0, request & 0xFFFFFFFF, b" ")
    except OSError as error:
        results.append(errno.errorcode[error.errno])
show(results)
""",
    "disk": f"""
import errno, os
results = []
for place in ("/workspace", "/tmp", "/dev/shm"):
    written = 0
    try:
        for number in range(64):
            with open(f"{{place}}/{{number}}", "wb") as file:
                written += file.write(bytes({MiB}))
    except OSError as error:
        results.append([written, errno.errorcode[error.errno]])
try:
    os.truncate("/dev/shm/0", {DISK_BYTES + 1})
except OSError as error:
    results.append(errno.errorcode[error.errno])
show(results)
""",
    "fork bomb": """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    pass
show(children)
""",
    "limits": "import resource; show([resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)])",
    "counters": f"""
import ctypes, errno, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(number, *arguments)
    return errno.errorcode.get(ctypes.get_errno(), "done")
def option(name, value):
    try:
        probe.setsockopt(1, name, value)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
results = {{}}
returning = ctypes.create_string_buffer(bytes([6, 0, 0, 0, 0, 0, 0xFF, 0x7F]))  # a filter that allows all
program = bytes([1, 0, 0, 0, 0, 0, 0, 0]) + ctypes.addressof(returning).to_bytes(8, "little")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    for name, number in {{"attach": 26, "attach bpf": 50, "attach to a group": 51, "attach bpf to a group": 52}}.items():
        results[name] = option(number, program)
results["prctl"] = call({NUMBERS["prctl"]}, 22, ctypes.c_long(2), program, 0, 0)
results["seccomp"] = call({NUMBERS["seccomp"]}, 1, ctypes.c_long(0), program)
results["io_setup"] = call({NUMBERS["io_setup"]}, 1, ctypes.byref(ctypes.c_long()))
results["mq_open"] = call({NUMBERS["mq_open"]}, b"q", 0o102, 0o600, None)
timers = 0
while timers < 200 and call({NUMBERS["timer_create"]}, 1, None, ctypes.byref(ctypes.c_int())) == "done":
    timers += 1
results["timers"] = timers
results["limits"] = [resource.getrlimit(getattr(resource, f"RLIMIT_{{name}}"))[1]
    for name in ("MSGQUEUE", "SIGPENDING", "RTPRIO", "NICE", "MEMLOCK")]
show(results)
""",
    "ordinary programs": """
import asyncio, concurrent.futures, multiprocessing, os, socket, sqlite3, subprocess, sys, tempfile, threading
results = {}
thread = threading.Thread(target=results.__setitem__, args=("thread", True))
thread.start(); thread.join()
results["subprocess"] = subprocess.run(["sh", "-c", "echo $((6 * 7))"], capture_output=True, text=True).stdout
async def echo():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=-1)
    return (await process.communicate())[0].decode()
results["asyncio"] = asyncio.run(echo())
with multiprocessing.get_context("fork").Pool(2) as pool:
    results["pool"] = pool.map(abs, [-1, -2])
with sqlite3.connect("/workspace/x.db") as database:
    database.execute("create table t (a)")
    results["sqlite"] = database.execute("insert into t values (1)").rowcount
results["localhost"] = socket.gethostbyname("localhost")
results["user"] = os.path.expanduser("~")
results["temporary"] = tempfile.gettempdir()
show(results)
""",
}

MEMORY_HOG = """
import os
if os.fork() == 0:
    kept = []
    while True:
        kept.append(bytearray(b"x") * 2**20)
show(os.wait()[1])
"""

LIBRARIES = """
import io, os
import numpy, pandas
import matplotlib; matplotlib.use("agg")
import matplotlib.pyplot as plt
from PIL import Image
plt.plot([1, 2]); plt.savefig("/workspace/figure.png")
show([int(numpy.linalg.inv(numpy.eye(3)).sum()), pandas.DataFrame({"a": [1, 2]}).a.sum().item(),
    Image.open("/workspace/figure.png").format])
"""


def _run(programs: dict[str, str], *, as_nobody: bool, bwrap: Path | None = None) -> dict[str, Any]:
    asked = {
        "image": "/usr/bin/python3" if as_nobody else sys.executable,
        "bwrap": str(bwrap) if bwrap else None,
        "programs": {name: _SHOW + source for name, source in programs.items()},
    }
    command = [sys.executable, "-m", "tests.security.local_trials"]
    environment = {**os.environ, SECRET: "told to nobody"}
    if as_nobody:
        command = [
            "setpriv",
            "--reuid",
            str(NOBODY),
            "--regid",
            str(NOBODY),
            "--clear-groups",
            "/usr/bin/python3",
            *command[1:],
        ]
        paths = [REPOSITORY, REPOSITORY / "proto", sysconfig.get_path("purelib")]
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": "/tmp",
        }
    finished = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=110
    )
    assert finished.returncode == 0, finished.stderr
    answers: dict[str, Any] = json.loads(finished.stdout)
    return answers


@pytest.fixture(scope="module", params=["our own user", "an ordinary user"])
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the output of the programs, by name."""
    require("local")
    as_nobody = request.param == "an ordinary user"
    if as_nobody:
        _require_nobody()
    answers = _run(PROGRAMS, as_nobody=as_nobody)
    for name, answer in answers.items():
        assert answer["printed"] is not None, (name, answer["stderr"])
    return {name: answer["printed"] for name, answer in answers.items()} | {
        "as root": not as_nobody and os.geteuid() == 0
    }


def _require_nobody() -> None:
    if os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    probe = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "/usr/bin/python3", "-c"]
    code = f"import sys; assert sys.version_info >= (3, 11); sys.path[:0] = [{sysconfig.get_path('purelib')!r}, {str(REPOSITORY)!r}]; import structlog, executor_server"
    if not shutil.which("setpriv") or subprocess.run([*probe, code], capture_output=True, cwd="/").returncode != 0:
        pytest.skip("an ordinary user has no Python >= 3.11 here that can read this repository")


def test_code_has_no_capabilities_no_new_privileges_and_a_filter(seen: dict[str, Any]) -> None:
    status = seen["status"][0]
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_code_is_root_neither_inside_nor_on_the_host(seen: dict[str, Any]) -> None:
    _, uids, groups, maps = seen["status"]
    assert uids == [1000, 1000, 1000]
    assert 0 not in groups
    # For an ordinary user, bubblewrap makes a namespace in between, in which that user is root: it mounts /dev/pts.
    assert maps["1000"] == (HOST_UID if seen["as root"] else 0)


def test_code_cannot_become_root_again(seen: dict[str, Any]) -> None:
    assert set(seen["regain"].values()) == {"refused"}


def test_code_writes_to_its_own_directories_only(seen: dict[str, Any]) -> None:
    assert sorted(seen["writable"]) == ["/dev/shm", "/tmp", "/workspace"]


def test_no_file_of_the_host_is_visible(seen: dict[str, Any]) -> None:
    assert (REPOSITORY / "pyproject.toml").exists() and Path("/etc/shadow").exists()
    assert seen["host files"] == []


def test_devices_are_the_harmless_ones(seen: dict[str, Any]) -> None:
    assert set(seen["devices"]) == {
        "null",
        "zero",
        "full",
        "random",
        "urandom",
        "shm",
        "fd",
        "stdin",
        "stdout",
        "stderr",
        # Terminals of the sandbox's own, and its memory, which the kernel does not give (bwrap(1), --dev).
        "ptmx",
        "pts",
        "tty",
        "core",
    }


def test_processes_of_the_host_are_invisible(seen: dict[str, Any]) -> None:
    assert seen["processes"] == ["1"]


def test_nothing_of_the_daemons_environment_or_descriptors_gets_in(seen: dict[str, Any]) -> None:
    environment, descriptors = seen["environment"]
    assert SECRET not in environment
    assert set(descriptors) <= {"0", "1", "2", "3"}  # 3 is the listing itself


def test_there_is_no_network_but_loopback(seen: dict[str, Any]) -> None:
    interfaces, refusal, abstract_sockets = seen["network"]
    assert interfaces == ["lo"]
    assert refusal == "ENETUNREACH"
    assert abstract_sockets == 0


def test_only_ordinary_socket_families_can_be_opened(seen: dict[str, Any]) -> None:
    allowed = {name for name, result in seen["families"].items() if result == "open"}
    assert allowed == {"netlink route", "unix", "inet"}
    assert set(seen["families"].values()) == {"open", "EPERM"}


def test_dangerous_system_calls_are_refused(seen: dict[str, Any]) -> None:
    results = dict(seen["system calls"])
    assert results.pop("clone3") == results.pop("unknown") == errno.ENOSYS
    assert {"unshare", "mount", "ptrace", "bpf", "keyctl", "io_uring_setup", "setns", "userfaultfd"} <= set(results)
    assert {name: result for name, result in results.items() if result != errno.EPERM} == {}


def test_no_input_can_be_injected_into_a_terminal(seen: dict[str, Any]) -> None:
    typing, console, typing_with_high_bits, window_size = seen["terminal"]
    assert typing == console == typing_with_high_bits == "EPERM"
    assert window_size == "ENOTTY"  # other requests reach the device


def test_files_are_bounded_in_total_and_each(seen: dict[str, Any]) -> None:
    workspace, temporary, shared, single = seen["disk"]
    for written, why in (workspace, temporary, shared):
        assert 0 < written <= DISK_BYTES
        assert why == "ENOSPC"
    assert single == "EFBIG"


def test_a_fork_bomb_is_bounded(seen: dict[str, Any]) -> None:
    assert 0 < seen["fork bomb"] < PROCESSES


def test_no_core_dumps_and_a_bounded_number_of_files(seen: dict[str, Any]) -> None:
    core, files = seen["limits"]
    assert core == [0, 0]
    assert files[1] <= rlimits.FIXED["nofile"]


def test_what_the_kernel_counts_for_all_sandboxes_is_refused_or_limited(seen: dict[str, Any]) -> None:
    """One sandbox could use it up: memory for filters and aio events of the machine, timers and queues of a user."""
    results = dict(seen["counters"])
    assert 0 < results.pop("timers") <= 128
    assert results.pop("limits") == [0, 128, 0, 0, 65_536]
    assert {name: result for name, result in results.items() if result not in ("EPERM", "ENOSYS")} == {}


def test_ordinary_programs_work(seen: dict[str, Any]) -> None:
    assert seen["ordinary programs"] == {
        "thread": True,
        "subprocess": "42\n",
        "asyncio": "1\n",
        "pool": [1, 2],
        "sqlite": 1,
        "localhost": "127.0.0.1",
        "user": "/workspace",
        "temporary": "/tmp",
    }


def test_scientific_libraries_work() -> None:
    require("local")
    for library in ("numpy", "pandas", "matplotlib", "PIL"):
        pytest.importorskip(library)
    answer = _run({"libraries": LIBRARIES}, as_nobody=False)["libraries"]
    assert answer["printed"] == [3, 3, "PNG"], answer["stderr"]


def test_a_memory_hog_is_killed_by_the_kernel_and_counted() -> None:
    require("local")
    answer = _run({"hog": MEMORY_HOG}, as_nobody=False)["hog"]
    if answer["oom_kills"] is None:
        pytest.skip("no control group limits memory here; the guest's own watch has its own test")
    assert answer["printed"] == 9  # the child, by SIGKILL; its parent lives
    assert answer["oom_kills"] == 1


def test_the_refused_calls_would_work_outside() -> None:
    """The control: unshare without flags, which is refused inside, succeeds on the host."""
    code = f"import ctypes; raise SystemExit(ctypes.CDLL(None).syscall({NUMBERS['unshare']}, 0))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
