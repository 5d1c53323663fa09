"""An idle sandbox releases memory that it does not need."""

from __future__ import annotations

import asyncio

from executor_server.sessions import Session
from tests.contract.harness import Harness
from tests.contract.marks import promise

pytestmark = promise("rest")

WATCH = """\
import os, threading, time
def processes():
    return sum(name.isdigit() for name in os.listdir("/proc"))
def watch():
    while processes() > 2:
        time.sleep(0.1)
    open("rested", "w").close()
threading.Thread(target=watch, daemon=True).start()
processes()
"""
POLL_S = 0.1


async def test_the_checker_of_an_idle_session_ends_and_comes_back(harness: Harness) -> None:
    """A session waits for a model most of its time; meanwhile it should hold no memory that it does not need."""
    session = await harness.session()
    assert (await harness.run(session, WATCH)).output == 3
    async with asyncio.timeout(60):
        # A request that needs no checker; the sandbox reports nothing by itself.
        while "rested" not in await _files(session):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    assert (await harness.run(session, "1 + 1")).output == 2


async def _files(session: Session) -> list[str]:
    files, _ = await session.list_files("")
    return [file.path for file in files]
