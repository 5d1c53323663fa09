"""One sandbox uses up what the kernel counts for a user; under an ordinary user's daemon all share that user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client import ExecutorClient
from executor_server.backends.local import LocalBackend
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core import SandboxSpec
from tests.security.test_local_isolation import NOBODY, REPOSITORY, _require_nobody
from tests.support.backends import require
from tests.support.daemon import running_daemon
from tests.support.forked_backend import ForkedBackend
from tests.support.leftovers import DAEMON_PREFIX

SPEC = SandboxSpec("base", 2**28, 32, 2**24, 60.0, fork_server="off")
_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704  # linux/nsfs.h

# Sends descriptors to itself until the kernel refuses more, or so many are in flight.
_SEND_ALL = """
import os, socket
held, sent, null = [], 0, os.open("/dev/null", os.O_RDONLY)
try:
    while sent < 9000:
        ends = socket.socketpair()
        held.append(ends)
        for _ in range(3):
            socket.send_fds(ends[0], [b"x"], [null] * 250)
            sent += 250
except OSError:
    pass
sent
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=DAEMON_PREFIX) as made:
        yield Path(made)


@pytest.fixture
def client() -> Iterator[ExecutorClient]:
    require("local")
    _require_nobody()
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX, dir="/tmp"))  # the other one is closed to that user
    os.chown(directory, NOBODY, NOBODY)
    paths = [REPOSITORY, REPOSITORY / "proto", sysconfig.get_path("purelib")]
    user = ("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups")
    own = (f"PYTHONPATH={os.pathsep.join(map(str, paths))}", "PYTHONDONTWRITEBYTECODE=1", "TMPDIR=/tmp")
    program = (*user, "env", *own, "/usr/bin/python3", "-m", "executor_server")
    with running_daemon(directory, program=program) as daemon, daemon.client() as connected:
        yield connected
    shutil.rmtree(directory)


def test_descriptors_in_flight_of_one_sandbox_cost_the_others_nothing(client: ExecutorClient) -> None:
    """Passing a program its pipes failed then: the interpreter was taken for stuck, and killed with its variables."""
    with client.create_session(authorized_imports=["*"]) as attacker, client.create_session() as other:
        assert other.execute("kept = 41").output is None
        assert 4000 < attacker.execute(_SEND_ALL).output < 9000
        again = other.execute("kept + 1")
        assert (again.output, again.generation) == (42, 1), again.error
        assert attacker.execute("sent").output > 4000


# Holds as many as the kernel gives, of which the machine, or a user of it, has few.
_HOLD_ALL = """
import ctypes, os
libc, watchers, terminals = ctypes.CDLL(None), [], []
while len(watchers) < 200 and (fd := libc.inotify_init()) >= 0:
    watchers.append(fd)
try:
    while len(terminals) < 200:
        terminals.append(os.openpty())
except OSError:
    pass
[len(watchers), len(terminals)]
"""


def hold_all(client: ExecutorClient) -> list[int]:
    """Returns what a sandbox could hold; checks that another one has some meanwhile."""
    with (
        client.create_session(authorized_imports=["*"]) as attacker,
        client.create_session(authorized_imports=["*"]) as other,
    ):
        held: list[int] = attacker.execute(_HOLD_ALL).output
        assert other.execute(_HOLD_ALL.replace("200", "2")).output == [2, 2]
    return held


def test_terminals_and_watchers_of_one_sandbox_leave_others_theirs(client: ExecutorClient) -> None:
    watchers, terminals = hold_all(client)
    assert 0 < watchers <= 16 and 0 < terminals <= 64


@pytest.mark.parametrize("kind", [LocalBackend, ForkedBackend])
async def test_no_namespace_of_a_sandbox_is_of_the_host_s_root(directory: Path, kind: type[LocalBackend]) -> None:
    """The kernel counts inotify, timers and queued signals of all that is in it for the owner, too: root had none."""
    require("local")
    backend = kind(directory)
    await backend.start()
    try:
        first = await owner_of_the_outermost_namespace(await backend.create(SPEC))
        other = await owner_of_the_outermost_namespace(await backend.create(SPEC))
    finally:
        await backend.close()
    assert 0 not in (first, other)
    assert (first == other) == (kind is ForkedBackend)


async def owner_of_the_outermost_namespace(sandbox: LocalSandbox) -> int:
    assert sandbox.process is not None
    owners: list[int] = []
    with contextlib.ExitStack() as opened:
        namespace = os.open(f"/proc/{sandbox.process.init_pid}/ns/user", os.O_RDONLY)
        with contextlib.suppress(PermissionError):  # above is the host's own
            while True:
                opened.callback(os.close, namespace)
                owners += struct.unpack("I", fcntl.ioctl(namespace, _NS_GET_OWNER_UID, bytes(4)))
                namespace = fcntl.ioctl(namespace, _NS_GET_PARENT)
    await sandbox.destroy()
    return owners[-2]
