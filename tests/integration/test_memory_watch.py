"""The supervisor's own watch over memory, on a host without control groups, in sandboxes that share pages with a template process."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor_server.backends.local import host
from executor_server.backends.local.cgroups import NoCgroups
from executor_server.backends.local.fork_server import fork_servers
from tests.contract.harness import MIB, Harness
from tests.support.backends import make_backend, require
from tests.support.forked_backend import ForkedBackend

MEMORY_BYTES = 1024 * MIB
# More than the memory when each is counted with all that it shares, and little of its own.
CHILDREN = """
import os, time, numpy, pandas
children = []
for _ in range(10):
    child = os.fork()
    if child == 0:
        time.sleep(1.0)
        os._exit(0)
    children.append(child)
[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""
HOGS = f"""
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * {200 * MIB}
        time.sleep(1000)
time.sleep(1000)
"""
COPIES = """
import os
def copies():
    found = set()
    for name in os.listdir('/proc'):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try: stat = open(f'/proc/{name}/stat').read().rpartition(')')[2].split()
            except OSError: continue
            if stat[0] != 'Z' and int(stat[1]) == 1 and int(stat[3]) == int(name): found.add(name)
    return found
"""
GROW = f"""
before = copies()
more = [bytearray(b'y' * {MIB}) for _ in range(130)]
while before <= copies(): pass
len(more)
"""


# Each would hold more than a sandbox's memory in what is no memory of its processes; none takes more than 300 MiB.
HIDDEN = {
    "unix sockets": """
import socket
held = []
for _ in range(900):
    ends = socket.socketpair(type=socket.SOCK_DGRAM)
    ends[0].setblocking(False)
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * MiB)
    held.append(ends)
    try:
        while True: ends[0].send(bytes(60_000))
    except BlockingIOError: pass
""",
    "tcp sockets": """
import socket
listener, held = socket.create_server(("127.0.0.1", 0)), []
for _ in range(100):
    ours = socket.create_connection(listener.getsockname())
    held += (ours, listener.accept())
    ours.setblocking(False)
    try:
        for _ in range(48): ours.send(bytes(64 * 1024))
    except BlockingIOError: pass
""",
    "udp sockets": """
import socket
held = []
for _ in range(1200):
    there, here = (socket.socket(type=socket.SOCK_DGRAM) for _ in range(2))
    there.bind(("127.0.0.1", 0))
    for _ in range(8): here.sendto(bytes(30_000), there.getsockname())
    held += (there, here)
""",
    "messages": """
import ctypes
libc = ctypes.CDLL(None)
for _ in range(12_000):
    queue = libc.msgget(0, 0o1600)
    for _ in range(2): libc.msgsnd(queue, ctypes.create_string_buffer(bytes([1]) + bytes(8200)), 8000, 0o4000)
""",
    "pipes": """
import os
more = bytes(range(256)) * 2**15
held = [os.pipe() for _ in range(1900)]
for _, end in held:
    os.set_blocking(end, False)
    try:
        while True: os.write(end, bytes(4096))
    except BlockingIOError: pass
""",
}
# The interpreter waits for a process that holds files in memory, and that can't be read.
CLOSED = """
import ctypes, os
child = os.fork()
if child == 0:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    held = os.memfd_create("held")
    for _ in range(10): os.write(held, bytes(MiB))
    time.sleep(1000)
os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    require("local")
    monkeypatch.setattr(host, "discover_cgroups", lambda: NoCgroups("the test wants none", "Wait for its end."))
    with tempfile.TemporaryDirectory(prefix="m-") as made:
        Path(made).chmod(0o755)  # a sandbox's user must be able to enter it
        yield Path(made)


@pytest.fixture
async def harness(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(fork_servers, "_MODULES_FROM_BYTES", MEMORY_BYTES)
    async with Harness(ForkedBackend(directory)) as made:
        yield made


@pytest.fixture
async def unshared(directory: Path) -> AsyncIterator[Harness]:
    """Its sandboxes share nothing."""
    async with Harness(make_backend("local", directory)) as made:
        yield made


async def test_pages_that_are_shared_with_a_template_are_not_counted_in_each_process(harness: Harness) -> None:
    session = await harness.session(memory_bytes=MEMORY_BYTES)
    ran = await harness.run(session, CHILDREN)
    assert (ran.outcome, ran.output) == ("succeeded", [0] * 10), ran.message


async def test_savepoints_are_kept_next_to_the_libraries_of_a_template(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that ended during the measurement, and the checker, were counted with all pages of the libraries."""
    monkeypatch.setattr(fork_servers, "_MODULES_FROM_BYTES", MEMORY_BYTES // 2)
    session = await harness.session(memory_bytes=MEMORY_BYTES // 2)
    await harness.run(session, "import numpy, pandas")
    taken = [await session.savepoints.take() for _ in range(6)]
    assert [(each.taken, each.dropped) for each in taken] == [(number, 0) for number in range(1, 7)]


async def test_memory_of_several_processes_is_out_of_memory(harness: Harness) -> None:
    session = await harness.session(memory_bytes=MEMORY_BYTES)
    assert (await harness.run(session, HOGS)).outcome == "out_of_memory"
    assert (await harness.run(session, "6 * 7")).output == 42


async def test_a_program_that_needs_the_memory_of_old_savepoints_gets_it(harness: Harness) -> None:
    session = await harness.session(memory_bytes=256 * MIB)
    await harness.run(session, f"{COPIES}\nx = bytearray(os.urandom(2**20)) * 40")
    for number in (1, 2, 3):
        await harness.run(session, f"for at in range(0, len(x), 4096): x[at] = {number}")
        assert (await session.savepoints.take()).dropped == 0
    grown = await harness.run(session, GROW)
    assert (grown.outcome, grown.output, grown.state) == ("succeeded", 130, "kept"), grown.message
    assert "the oldest savepoint was dropped, since memory was short\n" in grown.stderr
    left = await session.savepoints.listed()
    assert ([each.number for each in left.savepoints], left.dropped) == ([2, 3], 1)


async def test_a_program_that_takes_all_memory_leaves_the_newest_savepoint(harness: Harness) -> None:
    session = await harness.session(memory_bytes=MEMORY_BYTES)
    await harness.run(session, "x = bytearray(80 * 2**20)")
    for _ in range(2):
        await session.savepoints.take()
    assert (await harness.run(session, HOGS)).outcome == "out_of_memory"
    assert [each.number for each in (await session.savepoints.listed()).savepoints] == [2]
    await session.savepoints.roll_back(2)
    assert (await harness.run(session, "len(x)")).output == 80 * MIB


@pytest.mark.parametrize("what", HIDDEN)
async def test_memory_of_the_kernel_counts(unshared: Harness, what: str) -> None:
    session = await unshared.session(memory_bytes=128 * MIB, wall_time_s=20.0)
    code = f"import time\nMiB = 2**20\n{HIDDEN[what]}\ntime.sleep(2)"
    assert (await unshared.run(session, code)).outcome == "out_of_memory"
    assert (await unshared.run(session, "6 * 7")).output == 42


async def test_a_process_that_hides_its_files_is_ended(unshared: Harness) -> None:
    session = await unshared.session(memory_bytes=128 * MIB, wall_time_s=20.0)
    ran = await unshared.run(session, f"import time\nMiB = 2**20\n{CLOSED}")
    assert (ran.outcome, ran.output) == ("succeeded", -9), ran.message
    assert "it hid its memory" in ran.stderr


async def test_the_peak_has_what_no_process_has(unshared: Harness) -> None:
    session = await unshared.session(memory_bytes=256 * MIB)
    fill = f"held = [os.memfd_create('') for _ in range(5)]\nfor fd in held: os.write(fd, bytes({8 * MIB}))"
    ran = await unshared.run(session, f"import os, time\n{fill}\ntime.sleep(1)")
    assert ran.ended.usage.peak_memory_bytes > 45 * MIB, ran.message
