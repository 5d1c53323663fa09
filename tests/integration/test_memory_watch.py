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
