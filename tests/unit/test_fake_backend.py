"""The fake backend leaves nothing of a creation that is cancelled, as the real ones do."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tests.support.fake_backend import SPEC, FakeBackend


async def test_a_cancelled_creation_leaves_no_guest_that_listens(tmp_path: Path) -> None:
    """One did, since the listener was known a moment after it listened."""
    cancelled = 0
    for steps in range(4):
        backend = FakeBackend(tmp_path / str(steps))
        (tmp_path / str(steps)).mkdir()
        creation = asyncio.create_task(backend.create(SPEC))
        for _ in range(steps):
            await asyncio.sleep(0)
        creation.cancel()
        await asyncio.gather(creation, return_exceptions=True)
        cancelled += creation.cancelled()
        assert listening(tmp_path / str(steps)) == len(backend.living)
        for sandbox in backend.living:
            await sandbox.destroy()
    assert cancelled > 1


async def test_a_guest_that_dies_closes_a_connection_that_it_has_just_accepted(tmp_path: Path) -> None:
    """One stayed open when a pool ended a creation that had just connected, and its test had ended, too."""
    backend = FakeBackend(tmp_path)
    sandbox = await backend.create(SPEC)
    others = asyncio.all_tasks()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(sandbox.endpoint.socket_path))
        caller.setblocking(False)
        while asyncio.all_tasks() == others:  # noqa: ASYNC110 - asyncio has a task for a connection that it has accepted
            await asyncio.sleep(0)
        await sandbox.destroy()
        assert asyncio.all_tasks() == others
        assert caller.recv(1) == b""


def listening(directory: Path) -> int:
    """The number of sockets in the directory that take a connection."""
    count = 0
    for path in directory.iterdir():
        with socket.socket(socket.AF_UNIX) as caller:
            count += caller.connect_ex(str(path)) == 0
    return count
