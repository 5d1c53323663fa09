"""Sessions belong to clients: they end with them and not before, over a restart of the daemon too; and by their requests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import NotFound, Reason, ResourceExhausted, TooManySessions
from executor_server.core.lifecycle.admission import AdmissionController
from executor_server.core.lifecycle.observer import Observer, SessionEnd
from executor_server.core.model import Principal, SessionFacts
from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.quotas import Quotas
from executor_server.sessions import Session, SessionRequest
from executor_server.sessions.shared import SessionHooks
from tests.support.clock import Clock
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.fake_session import SessionDaemon, successive_daemons
from tests.support.polling import eventually_async
from tests.support.specs import LIMITS, session_spec

ALICE, BOB = Principal("alice", "a"), Principal("bob", "b")
A, B = "a" * 32, "b" * 32


class Ends(Observer):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        self.reasons.append(reason)


class OneSession(AdmissionController):
    """A quota of one session for each tenant."""

    def __init__(self) -> None:
        self.quotas = Quotas(lambda tenant: QuotasTable(sessions=1))

    async def session(self, principal: Principal, request_id: str, spec: Any) -> Any:
        return self.quotas.reserve_session(principal.tenant)


class Daemon(SessionDaemon):
    def __init__(
        self,
        backend: FakeBackend,
        directory: Path,
        clock: Clock,
        admission: AdmissionController | None = None,
        **settings: Any,
    ) -> None:
        self.clock = clock
        self.ends = Ends()
        hooks = SessionHooks(admission or AdmissionController(), self.ends)
        super().__init__(backend, directory, hooks, clock, **settings)

    async def create(
        self, request_id: str = "r", lease_id: str | None = A, owner: Principal = ALICE, **fields: Any
    ) -> Session:
        labels = fields.pop("labels", {})
        spec = session_spec(SPEC, replace(LIMITS, owner_grace_s=100.0, **fields), labels=labels)
        return await self.manager.create(owner, SessionRequest(request_id, spec, lease_id))

    async def wait(self, seconds: float) -> None:
        """Moves the clock, with a sweep every second."""
        for _ in range(int(seconds)):
            self.clock.now_s += 1.0
            await self.manager.sweeper.sweep()

    def ids(self, owner: Principal = ALICE) -> list[str]:
        return [session.session_id for session in self.manager.list(owner)]

    async def close(self) -> None:
        self.backend.admission.set()
        await super().close()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts a daemon, after the last one was killed."""
    backend, clock = FakeBackend(tmp_path), Clock()
    async with successive_daemons(backend, functools.partial(Daemon, backend, tmp_path, clock)) as start:
        yield start


# -- with their clients


async def test_a_lease_that_ends_ends_what_is_being_made_under_it(start: Any) -> None:
    daemon = await start()
    daemon.backend.admission.clear()
    mine, other = (asyncio.create_task(daemon.create(name, lease)) for name, lease in (("m", A), ("o", B)))
    assert await eventually_async(lambda: daemon.backend.asked == 2)
    assert daemon.manager.end_lease(ALICE, A) == 1
    with pytest.raises(NotFound):
        await mine
    daemon.backend.admission.set()
    kept = await other
    assert daemon.ids() == [kept.session_id]


# -- over a restart


async def test_a_restarted_daemon_gives_every_session_its_whole_grace(start: Any) -> None:
    first = await start()
    session = await first.create()
    first.manager.attach(session, B)
    detached = await first.create("d", lease_id=None)
    await first.wait(109)
    second = await start()
    assert [each.leased for each in second.manager.list(ALICE)] == [True, False]
    await second.wait(109)
    assert second.manager.renew_lease(ALICE, B).sessions == 1
    await second.wait(100)
    assert second.ids() == [session.session_id, detached.session_id]
    await second.wait(11)
    assert second.ids() == [detached.session_id]


async def test_who_has_let_go_before_a_restart_holds_nothing_after_it(start: Any) -> None:
    first = await start()
    session = await first.create()
    first.manager.attach(session, B)
    first.manager.end_lease(ALICE, A)
    second = await start()
    assert second.manager.renew_lease(ALICE, A).sessions == 0
    assert second.manager.end_lease(ALICE, B) == 1
    assert await eventually_async(lambda: second.ends.reasons == [SessionEnd.OWNER_CLOSED])


async def test_the_registry_forgets_who_held_what_is_gone(start: Any) -> None:
    daemon = await start()
    session = await daemon.create()
    assert daemon.registry.holders() == {session.session_id: [A]}
    await daemon.manager.delete(ALICE, session.session_id)
    assert daemon.registry.holders() == {}


# -- by their requests


async def test_a_session_whose_id_nobody_learnt_is_ended_by_its_request(start: Any) -> None:
    daemon = await start()
    await daemon.create("mine")
    with pytest.raises(NotFound):
        await daemon.manager.delete_by_request(BOB, "mine")
    assert len(daemon.ids()) == 1
    await daemon.manager.delete_by_request(ALICE, "mine")
    assert daemon.ids() == [] and not daemon.backend.living
    with pytest.raises(NotFound):
        await daemon.manager.delete_by_request(ALICE, "mine")


async def test_a_session_that_is_being_made_is_ended_by_its_request(start: Any) -> None:
    daemon = await start()
    daemon.backend.admission.clear()
    making = asyncio.create_task(daemon.create("mine"))
    assert await eventually_async(lambda: daemon.backend.asked)
    await daemon.manager.delete_by_request(ALICE, "mine")
    daemon.backend.admission.set()
    with pytest.raises(NotFound) as refused:
        await making
    assert refused.value.reason is Reason.SESSION_NOT_FOUND
    assert daemon.ids() == []
    assert await daemon.create("another"), "its place is free again"


async def test_a_request_that_comes_after_it_was_withdrawn_makes_nothing(start: Any) -> None:
    """Two calls of one client may overtake each other."""
    daemon = await start()
    with pytest.raises(NotFound):
        await daemon.manager.delete_by_request(ALICE, "late")
    with pytest.raises(NotFound, match="deleted before it was made"):
        await daemon.create("late")
    with pytest.raises(NotFound):
        await daemon.manager.created(ALICE, "late")
    assert await daemon.create("late", owner=BOB)
    for number in range(5000):
        with pytest.raises(NotFound):
            await daemon.manager.delete_by_request(ALICE, f"r{number}")
    assert await daemon.create("late"), "the oldest is forgotten"


# -- when there are too many


async def test_a_full_daemon_lists_the_callers_own_sessions_and_how_to_end_one(start: Any) -> None:
    daemon = await start(max_sessions=10)
    mine = [await daemon.create(f"r{number}", labels={"run": "a\x1b[31mb" + "x" * 40}) for number in range(9)]
    await daemon.create("other", owner=BOB)
    with pytest.raises(TooManySessions, match="the daemon has 10 sessions") as refused:
        await daemon.create("one more")
    text = refused.value.message
    assert f"{mine[0].session_id} (idle, 0 s old, run=a?[31mb{'x' * 13}…)" in text
    assert [each.session_id in text for each in mine] == [True] * 8 + [False]
    assert "and 1 more. End one: `executor rm SESSION`, `executor rm --all`, or session.close()" in text
    assert daemon.ids(BOB)[0] not in text, "another tenant's session was named"
    assert len(text) < 1000, "a status has no room for more"
    with pytest.raises(TooManySessions, match="None of them is yours"):
        await daemon.create("mine", owner=Principal("carol", "c"))


async def test_a_full_quota_lists_the_callers_own_sessions_too(start: Any) -> None:
    admission = OneSession()
    daemon = await start(admission)
    session = await daemon.create()
    admission.quotas.session_created(session.facts, 0.0)
    with pytest.raises(ResourceExhausted, match="quota sessions: 1 of 1 are in use") as refused:
        await daemon.create("more")
    assert refused.value.reason is Reason.QUOTA_EXCEEDED
    assert session.session_id in refused.value.message and "executor rm" in refused.value.message
