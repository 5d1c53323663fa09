"""Code in a sandbox of the Docker backend tries to see and do what it must not, from inside.

The programs are those of the local backend's test where both must answer the same, run by an ordinary session in a
process of their own. There the same programs are shown to succeed outside.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.harness import Harness
from tests.security.local_trials import DISK_BYTES, PROCESSES
from tests.security.test_local_isolation import (  # noqa: F401 - claims on the fixture `seen`, of this backend here
    PROGRAMS,
    test_a_fork_bomb_is_bounded,
    test_files_are_bounded_in_total_and_each,
    test_no_core_dumps_and_a_bounded_number_of_files,
    test_ordinary_programs_work,
    test_what_the_kernel_counts_for_all_sandboxes_is_refused_or_limited,
)
from tests.support.backends import make_backend, require

SECRET = "EXECUTOR_TEST_SECRET"
SOCKET_DIRECTORY = "/run/executor/socket"

_SHOW = "import json; show = lambda value: print(json.dumps(value))\n"
# Each prints one line; the end of the stream may not come, since children of the fork bomb keep it open.
_IN_A_PROCESS = """\
import subprocess, sys
ran = subprocess.Popen([sys.executable, "-I", "-c", {!r}], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
ran.stdout.readline().decode()
"""

OWN_PROGRAMS = {
    "socket": f"""
import errno, os, socket
def connect():
    socket.socket(socket.AF_UNIX).connect("{SOCKET_DIRECTORY}/guest.sock")
results = {{}}
for name, act in {{"list": lambda: os.listdir("{SOCKET_DIRECTORY}"), "connect": connect,
    "write": lambda: open("{SOCKET_DIRECTORY}/x", "w"), "make": lambda: os.mkdir("{SOCKET_DIRECTORY}/d"),
    "remove": lambda: os.unlink("{SOCKET_DIRECTORY}/guest.sock"), "open up": lambda: os.chmod("{SOCKET_DIRECTORY}", 0o777),
    "rename": lambda: os.rename("{SOCKET_DIRECTORY}", "{SOCKET_DIRECTORY}2")}}.items():
    try:
        act()
        results[name] = "done"
    except OSError as error:
        results[name] = errno.errorcode[error.errno]
show(results)
""",
    "host": """
import os
show([path for path in (CANARY, "/var/run/docker.sock", "/run/docker.sock", "/proc/1/root/etc", "/etc/shadow", "/proc/kcore",
    "/proc/1/environ", "/proc/1/mem", "/proc/keys", "/proc/sysrq-trigger") if os.access(path, os.R_OK)
    and os.path.isfile(path) or path == CANARY and os.path.exists(path)] + os.listdir("/sys"))
""",
    "guest": """
import os
results = []
for path in ("/run/executor/guest.pyz", "/etc/hosts", "/etc/passwd", "/usr/bin/python3"):
    try:
        os.close(os.open(path, os.O_WRONLY))
        results.append(path)
    except OSError:
        pass
show(results)
""",
    "devices": """
import os, stat
modes = {name: os.lstat(f"/dev/{name}").st_mode for name in os.listdir("/dev")}
show([name for name, mode in modes.items() if stat.S_ISCHR(mode) or stat.S_ISBLK(mode)])
""",
    "terminals": """
import os
held = []
try:
    while len(held) < 200:
        held.append(os.openpty())
except OSError:
    pass
show(len(held))
""",
    "owners": "import os; show(sorted({os.stat(f'/proc/{name}').st_uid for name in os.listdir('/proc') if name.isdigit()}))",
}
# Programs that fill something up come last.
SHARED = (
    "ordinary programs",
    "status",
    "regain",
    "writable",
    "environment",
    "network",
    "families",
    "system calls",
    "terminal",
    "limits",
    "counters",
    "disk",
    "fork bomb",
)


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    """Returns the output of the programs, by name."""
    require("docker")
    os.environ[SECRET] = "told to nobody"
    try:
        with tempfile.TemporaryDirectory(prefix="s-") as directory:
            yield asyncio.run(_run_all(Path(directory)))
    finally:
        del os.environ[SECRET]


async def _run_all(directory: Path) -> dict[str, Any]:
    canary = directory / "canary"
    canary.write_text("of the host")
    programs = OWN_PROGRAMS | {name: PROGRAMS[name] for name in SHARED}
    printed = {}
    async with Harness(make_backend("docker", directory)) as harness:
        session = await harness.session(processes=PROCESSES, disk_bytes=DISK_BYTES)
        for name, source in programs.items():
            code = _IN_A_PROCESS.format(f"CANARY = {str(canary)!r}\n{_SHOW}{source}")
            run = await harness.run(session, code)
            assert run.outcome == "succeeded", (name, run.message)
            printed[name] = json.loads(run.output)
    return printed


def test_code_has_no_capabilities_no_new_privileges_and_a_filter(seen: dict[str, Any]) -> None:
    status = seen["status"][0]
    assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb", "CapBnd", "CapInh")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_code_runs_as_a_user_of_its_own_and_never_as_root(seen: dict[str, Any]) -> None:
    _, (uid, *others), groups, _ = seen["status"]
    assert others == [uid, uid] and uid >= 10_000 and groups == [uid]
    assert seen["owners"] == [uid] or seen["owners"] == [
        0,
        uid,
    ]  # files of a process that is not dumpable belong to root
    assert set(seen["regain"].values()) == {"refused"}


def test_code_writes_to_its_own_directories_only(seen: dict[str, Any]) -> None:
    assert set(seen["writable"]) - {"/dev/mqueue"} == {
        "/dev/shm",
        "/tmp",
        "/tmp/.config",
        "/tmp/.config/git",
        "/var/tmp",
        "/workspace",
    }
    assert seen["guest"] == []


def test_the_directory_shared_with_the_daemon_is_shut(seen: dict[str, Any]) -> None:
    expected = dict.fromkeys(("list", "connect", "write", "make", "remove"), "EACCES")
    results = dict(seen["socket"])
    assert results.pop("open up") == "EPERM"
    assert results.pop("rename") in ("EROFS", "EACCES", "EBUSY")
    assert results == expected


def test_nothing_of_the_host_is_readable(seen: dict[str, Any]) -> None:
    assert seen["host"] == []


def test_devices_are_the_harmless_ones(seen: dict[str, Any]) -> None:
    assert set(seen["devices"]) <= {"full", "null", "ptmx", "random", "tty", "urandom", "zero", "console"}


def test_nothing_of_the_daemons_environment_or_descriptors_gets_in(seen: dict[str, Any]) -> None:
    environment, descriptors = seen["environment"]
    assert SECRET not in environment and "told to nobody" not in environment.values()
    assert set(descriptors) <= {"0", "1", "2", "3"}  # 3 is the listing itself


def test_there_is_no_network_but_loopback(seen: dict[str, Any]) -> None:
    assert seen["network"] == [["lo"], "ENETUNREACH", 0]


def test_only_ordinary_socket_families_can_be_opened(seen: dict[str, Any]) -> None:
    refused = {name for name, result in seen["families"].items() if result in ("EPERM", "ENOSYS")}
    assert refused == set(seen["families"]) - {"netlink route", "unix", "inet"}
    assert {seen["families"][name] for name in ("netlink route", "unix", "inet")} == {"open"}


def test_dangerous_system_calls_are_refused(seen: dict[str, Any]) -> None:
    results = dict(seen["system calls"])
    assert results.pop("clone3") == results.pop("unknown") == errno.ENOSYS
    assert results.pop("clone into a user namespace") in (errno.EPERM, errno.ENOSYS)
    assert {"unshare", "mount", "ptrace", "bpf", "keyctl", "io_uring_setup", "setns", "userfaultfd"} <= set(results)
    # ENOSYS where the runtime's library does not know a call's name yet.
    assert {name: result for name, result in results.items() if result not in (errno.EPERM, errno.ENOSYS)} == {}
    assert results["unshare"] == results["mount"] == results["ptrace"] == errno.EPERM


def test_a_sandbox_leaves_the_others_terminals(seen: dict[str, Any]) -> None:
    """Of which the machine has 4,096."""
    assert 0 < seen["terminals"] <= 64


def test_no_input_can_be_injected_into_a_terminal(seen: dict[str, Any]) -> None:
    *typing, window_size = seen["terminal"]
    assert set(typing) <= {"EPERM", "ENOSYS"}
    assert window_size == "ENOTTY"  # other requests reach the device
