"""A closing backend waits for creations, and a failed creation keeps its own error."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from executor_server.backends.base import MissingSandbox
from executor_server.backends.teardown import Creations, destroy_failed, swept
from executor_server.core.errors import SandboxFailure


async def test_the_end_waits_for_every_creation_also_for_one_that_fails() -> None:
    creations, release = Creations(), asyncio.Event()

    async def create() -> None:
        with creations.one():
            await release.wait()
            raise SandboxFailure("no")

    creation = asyncio.create_task(create())
    await asyncio.sleep(0)
    closing = asyncio.create_task(creations.finished())
    await asyncio.sleep(0)
    assert not closing.done()
    release.set()
    await closing
    with pytest.raises(SandboxFailure):
        await creation
    await creations.finished()


class _Stuck(MissingSandbox):
    async def destroy(self) -> None:
        raise SandboxFailure("the Engine does not answer")


async def test_a_sandbox_that_a_failed_creation_leaves_is_logged_and_not_raised() -> None:
    with capture_logs() as logs:
        await destroy_failed(_Stuck("f" * 16))
    assert [(entry["event"], entry["sandbox_id"]) for entry in logs] == [("sandbox_left_over", "f" * 16)]


def test_a_sweep_counts_what_it_destroyed_and_raises_what_it_could_not() -> None:
    assert swept(0, [], "removed") == 0 and swept(2, [], "removed") == 2
    with capture_logs() as logs, pytest.raises(SandboxFailure, match="1 sandboxes can't be removed"):
        swept(3, [SandboxFailure("no")], "removed")
    assert [entry["count"] for entry in logs] == [2]
