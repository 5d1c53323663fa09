"""Idle sandboxes can be paused where the backend can, and go on as they were."""

from __future__ import annotations

from executor_server.backends.base import Backend
from executor_server.backends.channel.daemon_channel import GuestChannel
from tests.contract.harness import Harness
from tests.contract.marks import instead, promise
from tests.contract.probes import Probe
from tests.contract.test_creation import SPEC, answers
from tests.support.polling import eventually_async


@promise("pause")
async def test_a_paused_sandbox_is_woken_with_its_guest_as_it_was(backend: Backend, probe: Probe) -> None:
    sandbox = await backend.create(SPEC)
    assert await answers(sandbox)
    assert await sandbox.pause() is True
    assert await probe.existing() == {sandbox.sandbox_id}
    await sandbox.wake()
    await sandbox.wake()
    assert await answers(sandbox, shown=1)


@promise("pause")
async def test_a_paused_sandbox_can_be_destroyed(backend: Backend, probe: Probe) -> None:
    sandbox = await backend.create(SPEC)
    assert await sandbox.pause() is True
    await sandbox.destroy()
    assert await probe.existing() == set()


@promise("pause")
async def test_an_idle_session_is_paused_and_the_next_request_wakes_it(probe: Probe) -> None:
    async with Harness(probe.pausing()) as harness:
        session = await harness.session()
        await harness.run(session, "kept = 'kept'")
        for _ in range(2):
            assert await eventually_async(lambda: session.state == "paused"), session.state
            assert (await harness.run(session, "kept")).output == "kept"
        assert session.generation == 1
    assert await probe.existing() == set()


@instead("pause")
async def test_a_sandbox_that_cannot_be_paused_says_so_and_goes_on(backend: Backend) -> None:
    sandbox = await backend.create(SPEC)
    assert sandbox.pause_idle_s is None
    assert await sandbox.pause() is False
    channel = GuestChannel(sandbox.endpoint)
    await channel.connect()
    await sandbox.wake()
    assert channel.connected
    channel.close()
