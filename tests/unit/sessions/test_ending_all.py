"""The end of a node's epoch: every session and every creation ends, and their sandboxes are gone when it has."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import NotFound, PreconditionFailed, Reason, SandboxFailure, Unavailable
from executor_server.core.lifecycle.admission import AdmissionController
from executor_server.core.lifecycle.observer import SessionEnd
from executor_server.core.model import Principal
from executor_server.sessions import SessionRequest, teardown
from executor_server.sessions.shared import SessionHooks, SessionIds
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.fake_session import SessionDaemon, successive_daemons
from tests.support.polling import eventually_async
from tests.support.specs import LIMITS, session_spec
from tests.unit.sessions.test_owners import Ends

ALICE = Principal("alice", "a")


class Ids(SessionIds):
    """Ids with an epoch in front."""

    node = "n1"

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.made = 0

    def new(self) -> str:
        self.made += 1
        return f"{self.epoch}-{self.made}"

    def why_lost(self, session_id: str) -> str:
        return "an earlier epoch" if int(session_id[0]) < self.epoch else ""

    def is_foreign(self, session_id: str) -> bool:
        return not session_id.startswith(f"{self.epoch}-")


class Daemon(SessionDaemon):
    def __init__(self, backend: FakeBackend, directory: Path, epoch: int = 1) -> None:
        self.ids, self.ends = Ids(epoch), Ends()
        super().__init__(backend, directory, SessionHooks(AdmissionController(), self.ends, ids=self.ids))

    async def create(self, request_id: str = "r") -> Any:
        return await self.manager.create(ALICE, SessionRequest(request_id, session_spec(SPEC, LIMITS)))


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    backend = FakeBackend(tmp_path)
    async with successive_daemons(backend, functools.partial(Daemon, backend, tmp_path)) as start:
        yield start


async def test_all_sessions_end_with_the_reason(start: Any) -> None:
    daemon = await start()
    session = await daemon.create()
    assert (session.session_id, session.node) == ("1-1", "n1")
    await daemon.manager.end_all(SessionEnd.LEASE_LOST, 5.0)
    assert (daemon.manager.list_all(), daemon.backend.living) == ([], [])
    assert daemon.ends.reasons == [SessionEnd.LEASE_LOST]


async def test_a_session_that_is_being_made_is_not_there_afterwards(start: Any) -> None:
    daemon = await start()
    daemon.backend.admission.clear()
    making = asyncio.create_task(daemon.create())
    assert await eventually_async(lambda: daemon.backend.asked)
    assert daemon.manager.requests_under_way() == [("alice", "r")]
    await daemon.manager.end_all(SessionEnd.LEASE_LOST, 5.0)
    with pytest.raises(NotFound):
        await making
    daemon.backend.admission.set()
    assert (daemon.manager.list_all(), daemon.backend.living, daemon.manager.requests_under_way()) == ([], [], [])


async def test_it_returns_only_when_a_sandbox_that_could_not_be_destroyed_is_gone(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "_DESTROY_AGAIN_S", 0.01)
    daemon = await start()
    await daemon.create()
    sandbox = daemon.backend.made[0]
    sandbox.failure = SandboxFailure("the Engine is away")
    ending = asyncio.create_task(daemon.manager.end_all(SessionEnd.LEASE_LOST, 60.0))
    assert await eventually_async(lambda: sandbox.destroyed > 2)
    assert not ending.done()
    sandbox.failure = None
    await ending


async def test_it_does_not_wait_longer_than_a_sandbox_can_live_by_itself(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teardown, "_DESTROY_AGAIN_S", 0.01)
    daemon = await start()
    await daemon.create()
    daemon.backend.made[0].failure = SandboxFailure("the Engine is away")
    await daemon.manager.end_all(SessionEnd.LEASE_LOST, 0.05)
    assert daemon.manager.list_all() == []


async def test_no_session_begins_meanwhile(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sandbox would outlive the epoch, and the front would refuse each report with a session of an earlier one."""
    monkeypatch.setattr(teardown, "_DESTROY_AGAIN_S", 0.01)
    daemon = await start()
    await daemon.create()
    daemon.backend.made[0].failure = SandboxFailure("the Engine is away")
    ending = asyncio.create_task(daemon.manager.end_all(SessionEnd.LEASE_LOST, 60.0))
    assert await eventually_async(lambda: daemon.backend.made[0].destroyed)
    with pytest.raises(Unavailable, match="is ending all its sessions") as refusal:
        await daemon.create("late")
    assert refusal.value.reason is Reason.DRAINING
    daemon.backend.made[0].failure = None
    await ending


async def test_sessions_can_be_made_again_afterwards(start: Any) -> None:
    daemon = await start()
    first = await daemon.create()
    await daemon.manager.end_all(SessionEnd.LEASE_LOST, 5.0)
    second = await daemon.create()
    assert second.session_id != first.session_id


async def test_an_id_of_an_earlier_epoch_is_lost_and_an_unknown_one_is_not_found(start: Any) -> None:
    daemon = await start(2)
    with pytest.raises(PreconditionFailed, match="an earlier epoch") as lost:
        daemon.manager.get(ALICE, "1-7")
    assert lost.value.reason is Reason.SESSION_LOST
    with pytest.raises(NotFound):
        daemon.manager.get(ALICE, "2-7")


async def test_sessions_of_another_epoch_end_when_the_daemon_comes_back(start: Any) -> None:
    daemon = await start()
    await daemon.create()
    again = await start(2)
    assert again.manager.list_all() == []
    assert again.ends.reasons == [SessionEnd.FOREIGN]
    assert not again.backend.living
