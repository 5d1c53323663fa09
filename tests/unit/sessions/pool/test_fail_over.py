"""Several backends as one: which one makes a sandbox, how long one is passed over, and the error when none does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from executor_server.backends.base import HostFinding, KnownSandbox, MissingSandbox, Sandbox
from executor_server.core.errors import (
    BackendFull,
    BackendSilent,
    EnvironmentFailed,
    ImageNotReady,
    SandboxFailure,
    SpecUnsupported,
)
from executor_server.core.model import SandboxSpec
from executor_server.core.packages import Progress
from executor_server.sessions.pool.fail_over import BackendSet, FailOverSettings
from executor_server.sessions.pool.health import HealthSettings
from tests.support.fake_backend import SPEC, FakeBackend
from tests.support.polling import eventually_async

BOTH = replace(SPEC, backends=("docker", "e2b"))
DOWN = SandboxFailure("the Engine does not answer")
NEVER = SpecUnsupported("Docker sandboxes can have no network here")
SILENT = BackendSilent("nothing came within 30 s")


class SandboxFactory(FakeBackend):
    """A backend of any name. Calls raise what the test puts into `wrong` under their name."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(directory)
        directory.mkdir(exist_ok=True)
        self.name = name
        self.wrong: dict[str, SandboxFailure] = {}
        self.calls: list[str] = []
        self.known: list[str] = []  # ids that it was asked to adopt
        self.living_of_old: dict[str, Sandbox] = {}
        self.may_start = asyncio.Event()
        self.may_start.set()

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what in self.wrong:
            raise self.wrong[what]

    async def start(self) -> None:
        self._do("start")
        await self.may_start.wait()

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:  # type: ignore[override]
        self._do("adopt")
        self.known = [each.sandbox_id for each in known]
        return {name: sandbox for name, sandbox in self.living_of_old.items() if name in self.known}

    async def sweep(self) -> int:
        self._do("sweep")
        return 2

    async def fingerprint(self, spec: SandboxSpec) -> str:
        self._do("fingerprint")
        return f"of {self.name}"

    async def create(self, spec: SandboxSpec) -> Sandbox:  # type: ignore[override]
        self.calls.append("create")
        await self.admission.wait()
        if "create" in self.wrong:
            raise self.wrong["create"]
        return MissingSandbox(f"{self.name}-sandbox", self.name)

    async def check_host(self) -> Sequence[HostFinding]:
        return [HostFinding("wall", True, "There is one.")]

    async def close(self) -> None:
        self._do("close")

    @property
    def creations(self) -> int:
        return self.calls.count("create")


class Bench:
    """Two backends as one, and a clock that stands still."""

    def __init__(self, directory: Path, settings: FailOverSettings) -> None:
        self.docker, self.e2b = SandboxFactory(directory / "docker", "docker"), SandboxFactory(directory / "e2b", "e2b")
        self.time_s = 100.0
        self.both = BackendSet([self.docker, self.e2b], settings, now_s=lambda: self.time_s)

    async def factory(self, spec: SandboxSpec = BOTH) -> str:
        return (await self.both.create(spec)).backend_name

    async def failure(self, spec: SandboxSpec = BOTH) -> SandboxFailure:
        with pytest.raises(SandboxFailure) as caught:
            await self.both.create(spec)
        return caught.value


HEALTH = HealthSettings(backoff_s=1.0, max_backoff_s=8.0, jitter=0.0)
SETTINGS = FailOverSettings(HEALTH, adopt_wait_s=0.0, adopt_retry_s=0.0)


@pytest.fixture
def unstarted(tmp_path: Path) -> Bench:
    return Bench(tmp_path, SETTINGS)


@pytest.fixture
async def bench(unstarted: Bench) -> Bench:
    await unstarted.both.start()
    await unstarted.both.adopt(())
    return unstarted


# -- making


async def test_the_first_of_the_order_makes_it_and_says_so(bench: Bench) -> None:
    assert await bench.factory() == "docker"
    assert await bench.factory(replace(SPEC, backends=("e2b", "docker"))) == "e2b"
    assert await bench.factory(SPEC) == "docker", "without an order the daemon's own"


@pytest.mark.parametrize("failure", [DOWN, BackendFull("no place", 5.0), ImageNotReady("being fetched", 5.0), NEVER])
async def test_a_new_sandbox_goes_to_the_next_when_the_first_cannot(bench: Bench, failure: SandboxFailure) -> None:
    bench.docker.wrong["create"] = failure
    assert await bench.factory() == "e2b"


async def test_one_that_is_named_alone_is_never_replaced(bench: Bench) -> None:
    bench.docker.wrong["create"] = DOWN
    assert await bench.failure(replace(SPEC, backends=("docker",))) is DOWN
    assert bench.e2b.creations == 0


async def test_a_dead_backend_is_asked_once_and_not_for_each_session(bench: Bench) -> None:
    bench.docker.wrong["create"] = DOWN
    assert [await bench.factory() for _ in range(20)] == ["e2b"] * 20
    assert bench.docker.creations == 1
    assert bench.both.states() == {"docker": "down", "e2b": "up"}


async def test_the_time_of_a_dead_backend_grows_to_its_bound_and_is_forgotten_when_it_is_back(bench: Bench) -> None:
    bench.docker.wrong["create"] = DOWN
    waits = []
    for _ in range(6):
        await bench.factory()
        asked, began_s = bench.docker.creations, bench.time_s
        while bench.docker.creations == asked:
            bench.time_s += 0.5
            await bench.factory()
        waits.append(bench.time_s - began_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    del bench.docker.wrong["create"]
    bench.time_s += 8.0
    assert [await bench.factory() for _ in range(3)] == ["docker"] * 3
    bench.docker.wrong["create"] = DOWN
    await bench.factory()
    bench.time_s += 1.0
    asked = bench.docker.creations
    await bench.factory()
    assert bench.docker.creations == asked + 1


async def test_the_wait_has_jitter_within_its_bound(tmp_path: Path) -> None:
    benches = [Bench(tmp_path, replace(SETTINGS, health=replace(HEALTH, jitter=0.5))) for _ in range(20)]
    waits = set()
    for bench in benches:
        await bench.both.start()
        await bench.both.adopt(())
        bench.docker.wrong["create"] = DOWN
        with capture_logs() as logs:
            await bench.factory()
        waits |= {entry["retry_after_s"] for entry in logs if entry["event"] == "backend_passed_over"}
    assert len(waits) > 1
    assert 0.5 <= min(waits) <= max(waits) <= 1.0


class Picky(SandboxFactory):
    """Cannot make what has little memory."""

    async def create(self, spec: SandboxSpec) -> Sandbox:  # type: ignore[override]
        if spec.memory_bytes < SPEC.memory_bytes:
            self.calls.append("create")
            raise SandboxFailure("the guest ended at once")
        return await super().create(spec)


async def test_what_nobody_could_make_keeps_no_one_else_from_the_backend(tmp_path: Path) -> None:
    """A client may ask for so little memory that no guest starts in it, as often as it likes."""
    docker, e2b = Picky(tmp_path / "docker", "docker"), SandboxFactory(tmp_path / "e2b", "e2b")
    both = BackendSet([docker, e2b], SETTINGS, now_s=lambda: 0.0)
    await both.start()
    await both.adopt(())
    for number in range(300):
        assert (await both.create(replace(BOTH, memory_bytes=number))).backend_name == "e2b"
    assert (await both.create(BOTH)).backend_name == "docker"


async def test_a_success_lets_all_others_try_again_at_once(bench: Bench) -> None:
    other = replace(BOTH, processes=SPEC.processes + 1)
    bench.docker.wrong["create"] = DOWN
    assert [await bench.factory(), await bench.factory(other)] == ["e2b", "e2b"]
    del bench.docker.wrong["create"]
    bench.time_s += 0.5
    assert await bench.factory() == "e2b", "its time is not over"
    third = replace(BOTH, processes=SPEC.processes + 2)
    assert await bench.factory(third) == "docker"
    assert [await bench.factory(), await bench.factory(other)] == ["docker", "docker"]


async def test_one_creation_at_a_time_finds_out_whether_a_backend_is_back(bench: Bench) -> None:
    bench.docker.wrong["create"] = DOWN
    await bench.factory()
    bench.time_s += 1.0
    bench.docker.admission.clear()
    trial = asyncio.create_task(bench.factory())
    await asyncio.sleep(0)
    assert [await bench.factory() for _ in range(5)] == ["e2b"] * 5
    assert bench.docker.creations == 2
    del bench.docker.wrong["create"]
    bench.docker.admission.set()
    assert await trial == "docker"
    assert await bench.factory() == "docker"


async def test_a_trial_that_is_given_up_leaves_the_next_one_to_another(bench: Bench) -> None:
    bench.docker.wrong["create"] = DOWN
    await bench.factory()
    bench.time_s += 1.0
    bench.docker.admission.clear()
    trial = asyncio.create_task(bench.factory())
    await asyncio.sleep(0)
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    bench.docker.admission.set()
    del bench.docker.wrong["create"]
    assert await bench.factory() == "docker"


async def test_those_that_fail_together_count_as_one_failure(bench: Bench) -> None:
    bench.docker.admission.clear()
    creations = [asyncio.create_task(bench.factory()) for _ in range(10)]
    await asyncio.sleep(0)
    bench.docker.wrong["create"] = DOWN
    bench.docker.admission.set()
    assert await asyncio.gather(*creations) == ["e2b"] * 10
    del bench.docker.wrong["create"]
    bench.time_s += 1.0
    assert await bench.factory() == "docker"


async def test_a_full_backend_is_asked_again_when_it_said(bench: Bench) -> None:
    bench.docker.wrong["create"] = BackendFull("no place", 30.0)
    assert await bench.factory() == "e2b"
    assert bench.both.states()["docker"] == "full"
    del bench.docker.wrong["create"]
    bench.time_s += 29.0
    refusal = await bench.failure(replace(SPEC, backends=("docker",)))
    assert isinstance(refusal, BackendFull)
    assert refusal.retry_after_s == 1.0
    bench.time_s += 1.0
    assert await bench.factory() == "docker"


async def test_one_that_was_full_and_then_is_down_is_asked_once_also_by_whom_it_has_failed_before(bench: Bench) -> None:
    """Otherwise a caller with a failing spec would wait for the dead one's time-out at each creation."""
    other = replace(BOTH, processes=SPEC.processes + 1)
    bench.docker.wrong["create"] = DOWN
    await bench.factory()
    bench.docker.wrong["create"] = BackendFull("no place", 5.0)
    await bench.factory(other)
    bench.docker.wrong["create"] = DOWN
    bench.time_s += 5.0
    asked = bench.docker.creations
    assert [await bench.factory() for _ in range(20)] == ["e2b"] * 20
    assert bench.docker.creations == asked + 1
    assert bench.both.states()["docker"] == "down"


async def test_a_silent_backend_is_asked_once_whatever_limits_clients_think_up(bench: Bench) -> None:
    """Each attempt costs its whole time-out, and one of the few places that all tenants share."""
    bench.docker.wrong["create"] = SILENT
    for number in range(300):
        assert await bench.factory(replace(BOTH, memory_bytes=SPEC.memory_bytes + number)) == "e2b"
    assert bench.docker.creations == 1
    assert bench.both.states()["docker"] == "down"


async def test_the_time_of_a_silent_backend_grows_and_ends_for_all_when_it_answers(bench: Bench) -> None:
    bench.docker.wrong["create"] = SILENT
    makes = [replace(BOTH, processes=number) for number in range(1, 1000)]
    waits = []
    for _ in range(5):
        await bench.factory(makes.pop())
        asked, began_s = bench.docker.creations, bench.time_s
        while bench.docker.creations == asked:
            bench.time_s += 0.5
            await bench.factory(makes.pop())
        waits.append(bench.time_s - began_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0]
    del bench.docker.wrong["create"]
    bench.time_s += 8.0
    assert [await bench.factory(makes.pop()) for _ in range(3)] == ["docker"] * 3
    assert bench.both.states()["docker"] == "up"


async def test_those_that_find_a_backend_silent_together_count_as_one(bench: Bench) -> None:
    bench.docker.admission.clear()
    creations = [asyncio.create_task(bench.factory(replace(BOTH, processes=number))) for number in range(1, 11)]
    await asyncio.sleep(0)
    bench.docker.wrong["create"] = SILENT
    bench.docker.admission.set()
    assert await asyncio.gather(*creations) == ["e2b"] * 10
    del bench.docker.wrong["create"]
    bench.time_s += 1.0
    assert await bench.factory() == "docker"


@pytest.mark.parametrize(("answer", "state"), [(DOWN, "down"), (BackendFull("no place", 30.0), "full")])
async def test_one_that_was_silent_and_then_answers_is_passed_over_for_what_it_says(
    bench: Bench, answer: SandboxFailure, state: str
) -> None:
    bench.docker.wrong["create"] = SILENT
    await bench.factory()
    bench.docker.wrong["create"] = answer
    bench.time_s += 1.0
    await bench.factory()
    assert bench.both.states()["docker"] == state
    del bench.docker.wrong["create"]
    others = await bench.factory(replace(BOTH, processes=SPEC.processes + 1))
    assert others == ("e2b" if state == "full" else "docker")


async def test_what_a_full_backend_says_is_bounded(bench: Bench) -> None:
    bench.docker.wrong["create"] = BackendFull("come back next year", 3e7)
    await bench.factory()
    del bench.docker.wrong["create"]
    bench.time_s += HEALTH.max_full_s
    assert await bench.factory() == "docker"


async def test_an_image_that_is_missing_says_nothing_of_the_backend(bench: Bench) -> None:
    bench.docker.wrong["create"] = ImageNotReady("nobody built it")
    await bench.factory()
    assert bench.both.states()["docker"] == "up"


async def test_a_spec_that_it_never_makes_says_nothing_of_the_backend(bench: Bench) -> None:
    bench.docker.wrong["create"] = NEVER
    assert [await bench.factory() for _ in range(2)] == ["e2b"] * 2
    assert bench.both.states()["docker"] == "up" and bench.docker.creations == 2
    assert await bench.failure(replace(SPEC, backends=("docker",))) is NEVER


@pytest.mark.parametrize("refusal", [NEVER, ImageNotReady("nobody built it")])
async def test_a_refusal_that_needs_no_answer_does_not_end_a_silence(bench: Bench, refusal: SandboxFailure) -> None:
    """A client could end it as often as it likes, and many creations at a time would wait out the time-out."""
    bench.docker.wrong["create"] = SILENT
    await bench.factory()
    bench.time_s += 1.0
    bench.docker.wrong["create"] = refusal
    await bench.factory()
    bench.docker.wrong["create"] = SILENT
    asked = bench.docker.creations
    bench.docker.admission.clear()
    creations = [asyncio.create_task(bench.factory(replace(BOTH, processes=number))) for number in range(1, 11)]
    await asyncio.sleep(0)
    bench.docker.admission.set()
    assert await asyncio.gather(*creations) == ["e2b"] * 10
    assert bench.docker.creations == asked + 1


FULL_SOON, FULL_LATE = BackendFull("full", 3.0), BackendFull("full too", 9.0)
FETCHED, MISSING = ImageNotReady("being fetched", 5.0), ImageNotReady("nobody built it")


@pytest.mark.parametrize(
    ("first", "second", "kind", "retry_after_s"),
    [
        (DOWN, FULL_SOON, BackendFull, 3.0),
        (FULL_LATE, FULL_SOON, BackendFull, 3.0),
        (FULL_SOON, MISSING, BackendFull, 3.0),
        (MISSING, FETCHED, ImageNotReady, 5.0),
        (FETCHED, DOWN, ImageNotReady, 5.0),
        (DOWN, MISSING, ImageNotReady, None),
    ],
)
async def test_when_none_can_the_failure_that_helps_most_is_told(
    bench: Bench, first: SandboxFailure, second: SandboxFailure, kind: type, retry_after_s: float | None
) -> None:
    bench.docker.wrong["create"], bench.e2b.wrong["create"] = first, second
    failure = await bench.failure()
    assert isinstance(failure, kind)
    assert getattr(failure, "retry_after_s", None) == retry_after_s


async def test_when_all_are_down_the_log_learns_of_each(bench: Bench) -> None:
    bench.docker.wrong["create"], bench.e2b.wrong["create"] = DOWN, SandboxFailure("the cloud is away")
    assert str(await bench.failure()) == "docker: the Engine does not answer; e2b: the cloud is away"
    again = str(await bench.failure())
    assert "the Engine does not answer" in again
    assert "the cloud is away" in again
    assert (bench.docker.creations, bench.e2b.creations) == (1, 1)


async def test_what_is_made_now_is_what_the_first_that_works_makes(bench: Bench) -> None:
    assert await bench.both.fingerprint(BOTH) == "of docker"
    bench.docker.wrong["create"] = DOWN
    await bench.factory()
    assert await bench.both.fingerprint(BOTH) == "of e2b"
    bench.time_s += 60.0
    assert await bench.both.fingerprint(BOTH) == "of e2b", "that it may be tried again does not mean that it is back"


# -- starting, and what an earlier daemon left


async def test_one_that_starts_is_enough(unstarted: Bench) -> None:
    unstarted.docker.wrong["start"] = DOWN
    with capture_logs() as logs:
        await unstarted.both.start()
        await unstarted.both.adopt(())
    assert await unstarted.factory() == "e2b"
    assert unstarted.docker.creations == 0
    assert [(entry["event"], entry["backend"]) for entry in logs] == [("backend_not_started", "docker")]


async def test_none_that_starts_is_a_failure_that_tells_of_all(unstarted: Bench) -> None:
    unstarted.docker.wrong["start"], unstarted.e2b.wrong["start"] = DOWN, SandboxFailure("no key")
    with pytest.raises(SandboxFailure, match=r"docker: the Engine does not answer; e2b: no key"):
        await unstarted.both.start()


async def test_a_late_one_is_started_by_a_sweep_and_destroys_what_was_left_of_it(unstarted: Bench) -> None:
    unstarted.docker.wrong["start"] = DOWN
    await unstarted.both.start()
    await unstarted.both.adopt(())
    with capture_logs() as logs:
        assert await unstarted.both.sweep() == 2, "of the other"
        unstarted.docker.wrong["start"] = SandboxFailure("another trouble")
        await unstarted.both.sweep()
        await unstarted.both.sweep()
        del unstarted.docker.wrong["start"]
        await unstarted.both.sweep()
    assert [entry["event"] for entry in logs] == ["backend_not_started", "backend_started"]
    assert unstarted.docker.calls[-2:] == ["start", "adopt"]
    assert unstarted.docker.known == []
    assert await unstarted.factory() == "docker"
    assert await unstarted.both.sweep() == 4


async def test_one_that_is_started_and_can_not_be_taken_over_does_not_serve(unstarted: Bench) -> None:
    unstarted.docker.wrong["adopt"] = SandboxFailure("2 sandboxes can't be removed")
    await unstarted.both.start()
    await unstarted.both.adopt(())
    assert await unstarted.factory() == "e2b"
    del unstarted.docker.wrong["adopt"]
    await unstarted.both.sweep()
    assert await unstarted.factory() == "docker"
    assert unstarted.docker.calls.count("start") == 1


def known(sandbox_id: str, backend: str) -> KnownSandbox:
    return KnownSandbox(sandbox_id, BOTH, b"token", backend)


async def test_each_adopts_its_own_and_those_of_one_that_is_down_say_why_they_are_gone(unstarted: Bench) -> None:
    living = MissingSandbox("one", "docker")  # any sandbox will do
    unstarted.docker.living_of_old = {"one": living}
    unstarted.e2b.wrong["start"] = SandboxFailure("the cloud is away")
    await unstarted.both.start()
    found = await unstarted.both.adopt([known("one", "docker"), known("two", "docker"), known("three", "e2b")])
    assert unstarted.docker.known == ["one", "two"]
    assert set(found) == {"one", "three"}
    assert found["one"] is living
    assert await found["three"].cause_of_death() == "its backend e2b could not be used when the daemon came back"


async def test_one_that_sessions_wait_for_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(SETTINGS, adopt_wait_s=30.0))
    living = MissingSandbox("one", "docker")
    bench.docker.living_of_old = {"one": living}
    bench.docker.wrong["start"] = DOWN
    await bench.both.start()
    adoption = asyncio.create_task(bench.both.adopt([known("one", "docker")]))
    assert await eventually_async(lambda: bench.docker.calls.count("start") >= 4)
    del bench.docker.wrong["start"]
    assert await asyncio.wait_for(adoption, 10.0) == {"one": living}


async def test_one_that_hangs_holds_up_the_start_once_where_nobody_has_a_session_there(unstarted: Bench) -> None:
    unstarted.docker.wrong["start"] = DOWN
    await unstarted.both.start()
    del unstarted.docker.wrong["start"]
    unstarted.docker.may_start.clear()
    assert await asyncio.wait_for(unstarted.both.adopt([known("one", "e2b")]), 10.0) == {}
    assert unstarted.docker.calls == ["start"]


async def test_one_that_hangs_is_waited_for_no_longer_than_the_time_for_it_and_its_start_goes_on(
    unstarted: Bench,
) -> None:
    unstarted.docker.wrong["start"] = DOWN
    await unstarted.both.start()
    del unstarted.docker.wrong["start"]
    unstarted.docker.may_start.clear()
    found = await asyncio.wait_for(unstarted.both.adopt([known("one", "docker")]), 10.0)
    assert await found["one"].cause_of_death() == "its backend docker could not be used when the daemon came back"
    assert str(await unstarted.failure(replace(SPEC, backends=("docker",)))).endswith("it has not started yet")
    late = asyncio.create_task(unstarted.both.sweep())
    unstarted.docker.may_start.set()
    await late
    assert unstarted.docker.calls == ["start", "start", "adopt"], "nobody started it a third time"
    assert unstarted.docker.known == [], "whose session it was knows by now that it is lost"
    assert await unstarted.factory() == "docker"


async def test_a_start_that_goes_on_outlives_whom_it_is_for_and_ends_with_the_set(unstarted: Bench) -> None:
    unstarted.docker.wrong["start"] = DOWN
    await unstarted.both.start()
    del unstarted.docker.wrong["start"]
    unstarted.docker.may_start.clear()
    await unstarted.both.adopt([known("one", "docker")])
    sweep = asyncio.create_task(unstarted.both.sweep())
    await asyncio.sleep(0)
    sweep.cancel()
    await asyncio.gather(sweep, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 2
    await asyncio.wait_for(unstarted.both.close(), 10.0)
    assert len(asyncio.all_tasks()) == 1
    assert unstarted.docker.calls == ["start", "start", "close"]


async def test_a_start_that_hangs_keeps_no_other_backend_from_being_swept(tmp_path: Path) -> None:
    """The sweep waited for the start, and the sweeper for the sweep."""
    bench = Bench(tmp_path, replace(SETTINGS, sweep_wait_s=0.0))
    bench.docker.wrong["start"] = DOWN
    await bench.both.start()
    await bench.both.adopt(())
    del bench.docker.wrong["start"]
    bench.docker.may_start.clear()
    assert [await asyncio.wait_for(bench.both.sweep(), 10.0) for _ in range(2)] == [2, 2]
    assert bench.e2b.calls.count("sweep") == 2
    bench.docker.may_start.set()
    assert await eventually_async(lambda: len(asyncio.all_tasks()) == 1)
    await bench.both.sweep()
    assert bench.docker.calls == ["start", "start", "adopt"]
    await bench.both.close()


# -- the rest


async def test_a_sweep_that_one_fails_at_is_made_by_the_others(bench: Bench) -> None:
    bench.docker.wrong["sweep"] = DOWN
    assert await bench.both.sweep() == 2
    bench.e2b.wrong["sweep"] = SandboxFailure("the cloud is away")
    with capture_logs() as logs:
        assert [await bench.both.sweep() for _ in range(3)] == [0, 0, 0]
    logged = [(entry["event"], entry["backend"]) for entry in logs]
    assert logged == [("backend_not_swept", "e2b")], "each failure is logged once"


async def test_all_are_closed_whatever_happens_to_one(bench: Bench) -> None:
    bench.docker.wrong["close"] = SandboxFailure("1 sandbox is left over")
    with pytest.raises(SandboxFailure, match="1 sandbox is left over"):
        await bench.both.close()
    assert bench.e2b.calls[-1] == "close"


async def test_findings_say_whose_they_are(bench: Bench) -> None:
    assert [finding.subject for finding in await bench.both.check_host()] == ["docker: wall", "e2b: wall"]


BUILDING = ImageNotReady("it is being made", 0.5, progress=Progress("resolving"))
CONTRADICTION = EnvironmentFailed("a and b contradict each other")


@pytest.mark.parametrize("failure", [BUILDING, CONTRADICTION])
async def test_packages_are_asked_of_one_backend_and_are_not_its_fault(bench: Bench, failure: SandboxFailure) -> None:
    bench.docker.wrong["create"] = failure
    for _ in range(3):
        assert await bench.failure() is failure
    assert (bench.docker.creations, bench.e2b.creations) == (3, 0)
    assert bench.both.states() == {"docker": "up", "e2b": "up"}
    bench.docker.wrong.clear()
    assert await bench.factory() == "docker", "it is not passed over"


async def test_an_environment_is_made_on_a_backend_that_works(bench: Bench) -> None:
    bench.docker.wrong["create"] = DOWN
    bench.e2b.wrong["create"] = BUILDING
    assert await bench.failure() is BUILDING
