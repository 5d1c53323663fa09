"""The supervisor's own watch over memory, on a host without control groups, in sandboxes that share pages with a zygote."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from executor_server.backends.local import host
from executor_server.backends.local.cgroups import NoCgroups
from executor_server.backends.local.nursery import nurseries
from tests.contract.harness import MIB, Harness
from tests.support.backends import require
from tests.support.forked_backend import ForkedBackend

MEMORY_BYTES = 512 * MIB
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
for _ in range(3):
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


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    require("local")
    monkeypatch.setattr(host, "discover_cgroups", lambda: NoCgroups("the test wants none", "Wait for its end."))
    monkeypatch.setattr(nurseries, "_MODULES_FROM_BYTES", MEMORY_BYTES)
    with tempfile.TemporaryDirectory(prefix="m-") as directory:
        Path(directory).chmod(0o755)  # a sandbox's user must be able to enter it
        async with Harness(ForkedBackend(Path(directory))) as made:
            yield made


async def test_pages_that_are_shared_with_a_zygote_are_not_counted_in_each_process(harness: Harness) -> None:
    session = await harness.session(memory_bytes=MEMORY_BYTES)
    ran = await harness.run(session, CHILDREN)
    assert (ran.outcome, ran.output) == ("succeeded", [0] * 10), ran.message


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
    assert "the oldest savepoints were dropped, since memory was short: 1\n" in grown.stderr
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
