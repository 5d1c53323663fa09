"""Sessions when another policy comes into force: kept, held to it, or ended; never in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from executor_server.core.errors import InvalidRequest, NotFound, PolicyViolation, Unavailable
from executor_server.core.model import Outcome, OutputMode, Principal
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.policy.decide import Policy
from executor_server.policy.file import parse_policy
from executor_server.policy.requested import RequestedLimits, RequestedSession
from executor_server.sessions import Session, SessionHooks, SessionRequest
from executor_server.sessions.journal.execution import Execution
from tests.support.fake_backend import FakeBackend
from tests.support.fake_session import SessionDaemon, result_of
from tests.support.polling import eventually_async
from tests.unit.sessions.watching import FakeAdmission, Witness

OWNER = Principal("tenant", "name")


def policy(version: str, on_reload: str = "keep", more: str = "", default: str = 'default = "p"') -> Policy:
    text = f'version = "{version}"\n{default}\n[profiles.p]\non_reload = "{on_reload}"\n{more}'
    return Policy(parse_policy(text.encode(), Path("p.toml")), images=["base"], backend="fake", orphan_time_s=60.0)


OLD = policy("old")
STRICTER = "imports.denied = ['os']\nlimits.default.wall_time_s = 5.0\nlimits.max.wall_time_s = 5.0"
NEW = policy("new", "tighten", STRICTER)


class Bench(SessionDaemon):
    def __init__(self, backend: FakeBackend, directory: Path) -> None:
        self.admission, self.witness = FakeAdmission(), Witness()
        super().__init__(backend, directory, SessionHooks(self.admission, self.witness))
        self.manager.follow(OLD)

    async def create(self, request_id: str = "r", by: Policy = OLD) -> Session:
        spec = by.decide(OWNER, RequestedSession(authorized_imports=("os", "json")))
        return await self.manager.create(OWNER, SessionRequest(request_id, spec))

    def is_there(self, session: Session) -> bool:
        return session in self.manager.list(OWNER)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    backend = FakeBackend(tmp_path)
    bench = Bench(backend, tmp_path)
    yield bench
    await bench.close()
    assert not backend.living
    assert await eventually_async(lambda: len(asyncio.all_tasks()) == 1), "a task outlived the manager"


async def execute(session: Session, name: str = "e", limits: RequestedLimits | None = None) -> Execution:
    return await session.execute(name, "1", OutputMode.TRAILING_EXPRESSION, limits or RequestedLimits())


async def test_a_session_is_kept_as_it_was_approved(bench: Bench) -> None:
    session = await bench.create()
    before = session.spec
    assert bench.manager.follow(policy("new", "keep", STRICTER)) == {"kept": 1}
    assert session.spec is before
    execution = await execute(session)
    bench.guest.end("e")
    assert (await result_of(execution)).policy_fingerprint == OLD.fingerprint
    assert bench.guest.of_kind(Kind.RESTRICT) == []


async def test_what_is_executed_after_a_reload_is_held_to_the_new_policy(bench: Bench) -> None:
    """The guest answers only when the running execution has ended."""
    session = await bench.create()
    waiting: list[Frame] = []
    bench.guest.on[Kind.RESTRICT] = waiting.append
    before = await execute(session, "before")
    assert bench.manager.follow(NEW) == {"tightened": 1}
    after = await execute(session, "after")
    assert session.spec.policy.version == session.facts.policy.version == "new"
    with pytest.raises(PolicyViolation):
        await execute(session, "more", RequestedLimits(wall_time_s=6.0))
    await bench.guest.got(Kind.EXECUTE, 2)
    kinds = [frame.kind for frame in bench.guest.received if frame.kind in (Kind.EXECUTE, Kind.RESTRICT)]
    assert kinds == [Kind.EXECUTE, Kind.RESTRICT, Kind.EXECUTE]
    assert [frame.head.number("wall_time_s") for frame in bench.guest.of_kind(Kind.EXECUTE)] == [60.0, 5.0]
    rules = json.loads(waiting[0].body)
    assert ("os" in rules["denied"], "os" in rules["authorized"], "json" in rules["authorized"]) == (True, False, True)
    bench.guest.end("before")
    bench.guest.done(waiting[0])
    bench.guest.end("after")
    fingerprints = [(await result_of(execution)).policy_fingerprint for execution in (before, after)]
    assert fingerprints == [OLD.fingerprint, NEW.fingerprint]
    assert await eventually_async(lambda: bench.registry.load()[0].spec == session.spec)


async def test_a_daemon_killed_before_the_guest_has_agreed_asks_it_again(bench: Bench) -> None:
    session = await bench.create()
    bench.guest.on[Kind.RESTRICT] = lambda _: None
    bench.manager.follow(NEW)
    await bench.guest.got(Kind.RESTRICT)
    assert [record.spec.policy.version for record in bench.registry.load()] == ["old"]
    assert session.state == "idle"


async def test_an_execution_is_found_again_though_less_is_granted_by_now(bench: Bench) -> None:
    session = await bench.create()
    default, much = await execute(session, "e1"), await execute(session, "e2", RequestedLimits(wall_time_s=50.0))
    bench.manager.follow(NEW)
    assert await execute(session, "e1") is default
    assert await execute(session, "e2", RequestedLimits(wall_time_s=50.0)) is much
    with pytest.raises(InvalidRequest):
        await execute(session, "e2", RequestedLimits(wall_time_s=4.0))


async def test_an_execution_that_waited_for_admission_gets_what_the_new_policy_grants(bench: Bench) -> None:
    session = await bench.create()
    bench.admission.slow.add("execution")
    beginning = asyncio.create_task(execute(session))
    assert await eventually_async(lambda: "execution" in bench.admission.names())
    bench.manager.follow(NEW)
    bench.admission.opened.set()
    assert (await beginning).policy_fingerprint == NEW.fingerprint
    assert (await bench.guest.got(Kind.EXECUTE)).head.number("wall_time_s") == 5.0


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (policy("end", "end"), "the policy has changed, and ends older sessions"),
        (policy("nobody", "keep", default=""), "no profile for its tenant any more"),
        (policy("small", "tighten", "limits.max.memory_bytes = 100_000_000\nlimits.default.memory_bytes = 100_000_000"), "its sandbox has memory_bytes"),
        (policy("elsewhere", "tighten", "sandbox.backends = ['docker']"), "does not allow the fake backend any more"),
    ],
)  # fmt: skip
async def test_a_session_that_the_new_policy_has_no_place_for_ends_and_says_why(
    bench: Bench, after: Policy, reason: str
) -> None:
    session = await bench.create()
    execution = await execute(session)
    assert bench.manager.follow(after) == {"ended": 1}
    with pytest.raises(NotFound):
        bench.manager.get(OWNER, session.session_id)
    result = await result_of(execution)
    assert result.error is not None
    assert result.outcome is Outcome.CANCELLED
    assert reason in result.error.message
    assert await eventually_async(lambda: not bench.backend.living)
    assert await eventually_async(lambda: bench.witness.notified[-1][0] == "session_ended")
    assert reason in bench.witness.notified[-1][1]


async def test_a_guest_that_can_not_be_held_to_the_new_policy_loses_its_session(bench: Bench) -> None:
    session = await bench.create()
    guest = bench.guest
    guest.on[Kind.RESTRICT] = lambda asked: guest.refuse(asked, "queue_full", "too many")
    bench.manager.follow(NEW)
    assert await eventually_async(lambda: not bench.is_there(session))
    assert await eventually_async(lambda: bench.witness.notified[-1][0] == "session_ended")
    assert "too many" in bench.witness.notified[-1][1]


async def test_a_busy_client_can_not_keep_its_session_from_being_held(bench: Bench) -> None:
    session = await bench.create()
    bench.guest.on[Kind.GET_VARIABLES] = lambda _: None

    async def read() -> None:
        async for _ in session.get_variables(["x"]):
            pass

    reads = [asyncio.create_task(read()) for _ in range(32)]
    await bench.guest.got(Kind.GET_VARIABLES, 32)
    bench.manager.follow(NEW)
    await bench.guest.got(Kind.RESTRICT)
    assert bench.is_there(session)
    for task in reads:
        task.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


async def test_a_session_that_ends_as_soon_as_it_is_made_is_refused_and_can_be_asked_for_again(bench: Bench) -> None:
    bench.backend.admission.clear()
    creation = asyncio.create_task(bench.create())
    assert await eventually_async(lambda: bench.backend.asked)
    ends = policy("end", "end")
    bench.manager.follow(ends)
    bench.backend.admission.set()
    with pytest.raises(Unavailable, match="the policy changed while") as refused:
        await creation
    assert refused.value.retry_after_s
    assert bench.is_there(await bench.create(by=ends))
    assert await eventually_async(lambda: len(bench.backend.living) == 1)


async def test_reloads_that_follow_each_other_end_with_the_last(bench: Bench) -> None:
    session = await bench.create()
    for number in range(20):
        bench.manager.follow(policy(str(number), "tighten", f"imports.denied = ['m{number}']"))
    await bench.guest.got(Kind.RESTRICT, 20)
    assert len(session.spec.denied_imports) == 20, "what was once denied stays so"
    assert await eventually_async(lambda: bench.registry.load()[0].spec == session.spec)
    assert session.spec.policy.version == "19"


async def test_the_same_policy_again_touches_nothing(bench: Bench) -> None:
    await bench.create()
    assert bench.manager.follow(policy("old")) == {}


# -- draining


async def test_a_daemon_that_takes_no_sessions_keeps_those_it_has_and_takes_others_again(bench: Bench) -> None:
    session = await bench.create()
    bench.manager.stop_taking()
    assert bench.manager.draining
    assert await bench.create() is session
    with pytest.raises(Unavailable):
        await bench.create("other")
    await execute(session)
    bench.manager.take_again()
    other = await bench.create("other")
    assert bench.manager.list_all() == [session, other]


async def test_an_administrator_can_not_have_a_stopping_daemon_take_sessions(bench: Bench) -> None:
    await bench.manager.drain(0.1)
    bench.manager.take_again()
    with pytest.raises(Unavailable):
        await bench.create()


async def test_what_is_killed_is_gone_whoever_owned_it(bench: Bench) -> None:
    session = await bench.create()
    await bench.manager.kill(session.session_id)
    assert not bench.backend.living
    with pytest.raises(NotFound):
        await bench.manager.kill(session.session_id)


async def test_a_repeated_request_finds_its_session_whatever_the_policy_has_become(bench: Bench) -> None:
    session = await bench.create("r")
    assert await bench.manager.created(OWNER, "r") is session
    assert await bench.manager.created(OWNER, "another") is None
    assert await bench.manager.created(Principal("other", "name"), "r") is None
