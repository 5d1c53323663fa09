"""One sandbox uses up what the kernel counts for a user; under an ordinary user's daemon all sandboxes share that user."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client import ExecutorClient
from tests.security.test_local_isolation import NOBODY, REPOSITORY, _require_nobody
from tests.support.backends import require
from tests.support.daemon import running_daemon
from tests.support.leftovers import DAEMON_PREFIX

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
    assert 0 < watchers <= 32 and 0 < terminals <= 64


def test_they_leave_others_theirs_under_a_daemon_of_root(directory: Path) -> None:
    require("local")
    with running_daemon(directory) as daemon, daemon.client() as connected:
        watchers, terminals = hold_all(connected)
    assert 0 < watchers <= 32 and 0 < terminals <= 64
