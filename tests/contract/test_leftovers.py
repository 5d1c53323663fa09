"""Nothing is left of a sandbox that ends, of a backend that closes, and of strays."""

from __future__ import annotations

import asyncio

import pytest

from executor_server.backends.base import Backend
from executor_server.core.errors import SandboxFailure
from tests.contract.harness import Harness
from tests.contract.marks import promise
from tests.contract.probes import STRAY_ID, Probe
from tests.contract.test_creation import SPEC, answers


@promise("leak-destroy")
async def test_a_sandbox_that_is_destroyed_leaves_nothing(backend: Backend, probe: Probe) -> None:
    sandbox = await backend.create(SPEC)
    await asyncio.gather(*(sandbox.destroy() for _ in range(3)))
    await sandbox.destroy()
    assert await probe.existing() == set()


@promise("leak-destroy")
async def test_a_destruction_whose_caller_was_cancelled_can_be_repeated(backend: Backend, probe: Probe) -> None:
    sandbox = await backend.create(SPEC)
    first = asyncio.ensure_future(sandbox.destroy())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await sandbox.destroy()
    assert await probe.existing() == set()


@promise("leak-dead")
async def test_a_sandbox_that_has_died_is_removed_too(backend: Backend, probe: Probe) -> None:
    sandbox = await backend.create(SPEC)
    await probe.kill(sandbox.sandbox_id)
    await sandbox.destroy()
    assert await probe.existing() == set()


@promise("leak-session")
async def test_the_end_of_a_session_is_the_end_of_its_sandbox(harness: Harness) -> None:
    session = await harness.session()
    assert len(await harness.probe.existing()) == 1
    execution = await harness.begin(session, "print('runs')\nimport time\ntime.sleep(1e6)")
    await anext(execution.events())
    await harness.end_session(session)
    assert await harness.probe.existing() == set()


@promise("leak-close")
async def test_closing_destroys_every_sandbox_also_one_that_is_being_made(probe: Probe) -> None:
    backend = probe.backend()
    await backend.start()
    await backend.adopt(())
    await backend.create(SPEC)
    creation = asyncio.ensure_future(backend.create(SPEC))
    await asyncio.sleep(0)
    await backend.close()
    await asyncio.wait([creation])
    assert await probe.existing() == set()
    with pytest.raises(SandboxFailure, match="not started"):
        await backend.create(SPEC)


@promise("sweep")
async def test_a_sweep_finds_strays_and_leaves_living_sandboxes_alone(
    backend: Backend,
    probe: Probe,
) -> None:
    sandbox = await backend.create(SPEC)
    await probe.make_stray()
    assert await probe.existing() == {sandbox.sandbox_id, STRAY_ID}
    assert await backend.sweep() == 1
    assert await probe.existing() == {sandbox.sandbox_id}
    assert await backend.sweep() == 0
    assert await answers(sandbox)


@promise("sweep")
async def test_a_sweep_leaves_a_creation_alone(backend: Backend, probe: Probe) -> None:
    creation = asyncio.ensure_future(backend.create(SPEC))
    while not creation.done():
        assert await backend.sweep() == 0
        await asyncio.sleep(0)
    sandbox = await creation
    assert await probe.existing() == {sandbox.sandbox_id}
