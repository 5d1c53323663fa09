"""A daemon is killed and another one starts: it takes over known sandboxes, and destroys unknown ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from executor_server.backends.base import Backend, KnownSandbox
from executor_server.core.errors import PreconditionFailed, SandboxFailure
from executor_server.core.model import Log
from tests.contract.harness import PRINCIPAL, Harness, follow, pieces
from tests.contract.marks import promise
from tests.contract.probes import Probe
from tests.contract.test_creation import SPEC, answers

NOBODY = KnownSandbox("f" * 16, SPEC, bytes(32), "")


@asynccontextmanager
async def started(probe: Probe) -> AsyncIterator[Backend]:
    """A backend that has not adopted yet."""
    backend = probe.backend()
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@promise("restart-adopt")
async def test_the_next_daemon_takes_over_known_sandboxes(probe: Probe) -> None:
    known, fingerprint = await probe.left_by_a_killed_daemon(SPEC)
    assert await probe.existing() == {known.sandbox_id}
    async with started(probe) as backend:
        adopted = await backend.adopt([known, NOBODY])
        assert set(adopted) == {known.sandbox_id}
        sandbox = adopted[known.sandbox_id]
        assert (sandbox.sandbox_id, sandbox.fingerprint) == (known.sandbox_id, fingerprint)
        assert sandbox.fingerprint == await backend.fingerprint(SPEC)
        assert await answers(sandbox)
        assert await backend.sweep() == 0
        await sandbox.destroy()
        assert await probe.existing() == set()


@promise("restart-adopt", "leak-close")
async def test_closing_destroys_sandboxes_that_were_taken_over(probe: Probe) -> None:
    known, _ = await probe.left_by_a_killed_daemon(SPEC)
    async with started(probe) as backend:
        await backend.adopt([known])
    assert await probe.existing() == set()


@promise("restart-strays")
async def test_unknown_sandboxes_are_destroyed_at_the_start(probe: Probe) -> None:
    await probe.left_by_a_killed_daemon(SPEC)
    async with started(probe) as backend:
        assert await backend.adopt([]) == {}
        assert await probe.existing() == set()


@promise("restart-dead")
async def test_a_sandbox_that_died_meanwhile_is_removed_and_not_taken_over(probe: Probe) -> None:
    """This happens when the host reboots: the registry is there, and nothing else."""
    known, _ = await probe.left_by_a_killed_daemon(SPEC)
    await probe.kill(known.sandbox_id)
    async with started(probe) as backend:
        assert await backend.adopt([known]) == {}
        assert await probe.existing() == set()


@promise("restart-alone")
async def test_two_daemons_cannot_share_a_state_directory(probe: Probe) -> None:
    async with started(probe) as backend:
        await backend.adopt([])
        sandbox = await backend.create(SPEC)
        with pytest.raises(SandboxFailure, match="another daemon"):
            await probe.backend().start()
        assert await answers(sandbox)


@promise("restart-session")
async def test_a_session_goes_on_with_its_variables_and_its_execution(probe: Probe) -> None:
    books, session_id, execution_id = await probe.session_of_a_killed_daemon(SPEC)
    async with Harness(probe.backend(), books) as harness:
        session = harness.manager.get(PRINCIPAL, session_id)
        execution = session.execution(execution_id)
        assert not execution.done, "it waits for a file"
        await session.put_file("go", 0, pieces(b""))
        run = await follow(execution)
        assert (run.outcome, run.output, run.stdout) == ("succeeded", "kept", "before\nafter\n")
        assert [event.number for event in run.events] == list(range(1, len(run.events) + 1))
        assert (await harness.run(session, "kept")).output == "kept"
        assert session.generation == 1
    assert await probe.existing() == set()


@promise("restart-session", "savepoints")
async def test_a_savepoint_outlives_the_daemon(probe: Probe) -> None:
    books, session_id, execution_id = await probe.session_of_a_killed_daemon(SPEC)
    async with Harness(probe.backend(), books) as harness:
        session = harness.manager.get(PRINCIPAL, session_id)
        await session.put_file("go", 0, pieces(b""))
        await follow(session.execution(execution_id))
        back = await session.savepoints.roll_back(1)
        assert ([each.number for each in back.savepoints], back.generation) == ([1], 2)
        assert (await harness.run(session, "[kept, 'new' in globals()]")).output == ["kept", False]


@promise("restart-dead", "end-lost")
async def test_a_session_whose_sandbox_died_meanwhile_is_lost_and_says_so(probe: Probe) -> None:
    books, session_id, execution_id = await probe.session_of_a_killed_daemon(SPEC)
    for sandbox_id in await probe.existing():
        await probe.kill(sandbox_id)
    async with Harness(probe.backend(), books) as harness:
        session = harness.manager.get(PRINCIPAL, session_id)
        run = await follow(session.execution(execution_id))
        assert (run.outcome, run.state, session.state) == ("lost", "lost", "lost")
        assert [event.kind.text for event in run.events if isinstance(event.kind, Log)] == ["before\n"]
        with pytest.raises(PreconditionFailed, match="sandbox"):
            await harness.begin(session, "1")
    assert await probe.existing() == set()
