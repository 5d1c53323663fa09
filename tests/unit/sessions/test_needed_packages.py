"""Sessions whose image lacks modules: packages are added where the policy does so by itself, and no sandbox is wasted
on what is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.environments import Environment
from executor_server.core.config.state_dir import StateDir
from executor_server.core.errors import (
    EnvironmentFailed,
    ImageNotReady,
    InvalidRequest,
    PreconditionFailed,
    Reason,
    SandboxFailure,
    Unavailable,
)
from executor_server.core.lifecycle import AdmissionController
from executor_server.core.model import Principal, SandboxSpec, SessionSpec
from executor_server.core.packages import PackagesSpec, Progress
from executor_server.guest.wire.frames import Frame, Kind
from executor_server.sessions import Session, SessionHooks, SessionManager, SessionRequest, SessionSettings
from executor_server.sessions.journal.registry import Registry
from executor_server.sessions.pool.pool import PoolSettings, WarmPool
from tests.support.fake_backend import SPEC, FakeBackend, FakeSandbox
from tests.support.fake_guest import FakeGuest
from tests.support.specs import LIMITS, POLICY, session_spec

ALICE = Principal("alice", "a")
BUILDING = ImageNotReady("it is being made", 0.5, progress=Progress("installing", 1, 2, "packages"))


class Packages(FakeBackend):
    """Its image has no modules but those of its packages. Environments are ready after so many times of asking."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.times_to_ask = 0
        self.failure: SandboxFailure | None = None
        self.identity = "image 1"
        self.specs: list[SandboxSpec] = []
        self.with_modules: dict[str, tuple[str, ...]] = {}  # by image
        self.prelude_needs = ""

    def _require(self, spec: SandboxSpec) -> None:
        if spec.packages is not None:
            if self.failure is not None:
                raise self.failure
            if self.times_to_ask:
                self.times_to_ask -= 1
                raise BUILDING

    async def fingerprint(self, spec: SandboxSpec) -> str:
        self._require(spec)
        return f"{self.identity} {spec.image} {spec.packages}"

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        self._require(spec)
        return Environment("env-1", self._directory, 0, ())

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        fingerprint = await self.fingerprint(spec)
        there = self.with_modules.get(spec.image, ())
        if spec.packages is not None:
            there += tuple(each.removeprefix("dist-") for each in spec.packages.requirements)
        self.prepare = lambda guest: self._answer(guest, there)
        self.specs.append(spec)
        sandbox = await super().create(spec)
        sandbox.fingerprint = fingerprint
        return sandbox

    def _answer(self, guest: FakeGuest, there: Sequence[str]) -> None:
        def find(frame: Frame) -> None:
            asked = json.loads(frame.body)
            guest.done(frame, json.dumps([name for name in asked if name not in there]).encode())

        def configure(frame: Frame) -> None:
            if self.prelude_needs and self.prelude_needs not in there:
                guest.refuse(frame, "prelude_failed", "the prelude fails")
            else:
                guest.done(frame)

        guest.on[Kind.FIND_MODULES] = find
        guest.on[Kind.CONFIGURE] = configure


class AutoPolicy:
    """Adds the packages of these modules, as `dist-NAME`."""

    fingerprint = POLICY.fingerprint

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        self.asked: list[str] = []

    def with_packages(self, spec: SessionSpec, missing: Sequence[str]) -> SessionSpec | None:
        there = spec.sandbox.packages.requirements if spec.sandbox.packages is not None else ()
        self.asked = list(missing)
        tops = [name.partition(".")[0] for name in missing]
        added = {f"dist-{name}" for name in tops if name in self.modules} - {*there}
        if not added:
            return None
        packages = PackagesSpec(tuple(sorted({*there, *added})))
        return replace(spec, sandbox=replace(spec.sandbox, packages=packages))


class Counted(AdmissionController):
    def __init__(self) -> None:
        self.sessions = 0

    async def session(self, principal: Principal, request_id: str, spec: SessionSpec) -> Any:
        self.sessions += 1
        return await super().session(principal, request_id, spec)


class Bench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backend = Packages(directory)
        self.pool = WarmPool(self.backend, PoolSettings())
        self.registry = Registry(StateDir(directory))
        self.admission = Counted()
        hooks = SessionHooks(self.admission, environment_of=lambda sandbox_id: f"env of {sandbox_id}")
        self.manager = SessionManager(self.backend, self.pool, self.registry, SessionSettings(), hooks)

    def follow(self, *modules: str) -> AutoPolicy:
        policy: Any = AutoPolicy(*modules)
        self.manager.follow(policy)
        made: AutoPolicy = policy
        return made

    async def create(
        self, request_id: str, *imports: str, spec: SandboxSpec = SPEC, modules: tuple[str, ...] = (), prelude: str = ""
    ) -> Session:
        approved = session_spec(spec, LIMITS, imports, prelude)
        return await self.manager.create(ALICE, SessionRequest(request_id, approved, modules=modules))

    async def waited(self, request_id: str, *imports: str, **more: Any) -> tuple[Session, int]:
        """Repeats the request until there is a session; returns how often it had to wait, too."""
        for times in range(100):
            try:
                return await self.create(request_id, *imports, **more), times
            except Unavailable as refused:
                assert (refused.reason, refused.retry_after_s) == (Reason.IMAGE_NOT_READY, 0.5)
                assert refused.progress == Progress("installing", 1, 2, "packages")
        raise AssertionError("it never got ready")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    await bench.manager.close()
    await bench.pool.close()
    assert not bench.backend.living, "a sandbox outlived its manager"
    bench.registry.close()
    assert len(asyncio.all_tasks()) == 1


def requirements(session: Session) -> tuple[str, ...]:
    packages = session.spec.sandbox.packages
    return () if packages is None else packages.requirements


async def test_a_policy_that_adds_packages_gives_a_sandbox_that_has_them(bench: Bench) -> None:
    bench.follow("sklearn", "PIL")
    session = await bench.create("r", "sklearn.*", "PIL", "math")
    assert requirements(session) == ("dist-PIL", "dist-sklearn")
    assert session.missing_modules == ()
    assert session.facts.packages == ("dist-PIL", "dist-sklearn")
    assert session.environment_id == f"env of {session.record.sandbox_id}"
    assert len(bench.backend.specs) == 2 and len(bench.backend.living) == 1, "the first sandbox is gone"


async def test_what_is_known_to_be_missing_costs_no_sandbox(bench: Bench) -> None:
    bench.follow("sklearn")
    await bench.create("first", "sklearn")
    made = len(bench.backend.specs)
    session = await bench.create("second", "sklearn")
    assert requirements(session) == ("dist-sklearn",)
    assert [spec.packages for spec in bench.backend.specs[made:]] == [PackagesSpec(("dist-sklearn",))]


async def test_an_image_that_was_replaced_is_looked_at_again(bench: Bench) -> None:
    bench.follow("sklearn")
    await bench.create("first", "sklearn")
    bench.backend.identity, bench.backend.with_modules = "image 2", {SPEC.image: ("sklearn",)}
    assert requirements(await bench.create("second", "sklearn")) == ()


async def test_waiting_for_an_environment_wastes_one_sandbox_and_one_admission(bench: Bench) -> None:
    bench.follow("sklearn")
    bench.backend.times_to_ask = 10
    session, waits = await bench.waited("r", "sklearn")
    assert waits == 10 and requirements(session) == ("dist-sklearn",)
    assert [spec.packages is None for spec in bench.backend.specs] == [True, False]
    assert bench.admission.sessions == 2, "when it was asked for, and when it could be made"


async def test_packages_that_are_asked_for_waste_none(bench: Bench) -> None:
    bench.backend.times_to_ask = 3
    spec = replace(SPEC, packages=PackagesSpec(("polars",)))
    session, waits = await bench.waited("r", spec=spec)
    assert waits == 3 and requirements(session) == ("polars",)
    assert bench.backend.specs == [spec]


async def test_what_no_policy_adds_is_missing_and_said(bench: Bench) -> None:
    for policy in ((), ("sklearn",)):
        bench.follow(*policy)
        session = await bench.create(f"r{policy}", "sklearn", "bs4")
        assert session.missing_modules == tuple(name for name in ("sklearn", "bs4") if name not in policy)
    assert requirements(session) == ("dist-sklearn",)


async def test_a_module_that_no_package_brings_stays_missing(bench: Bench) -> None:
    bench.follow("sklearn")
    spec = replace(SPEC, packages=PackagesSpec(("dist-sklearn", "polars")))
    session = await bench.create("r", "sklearn", "bs4", spec=spec)
    assert requirements(session) == ("dist-sklearn", "polars") and session.missing_modules == ("bs4",)
    assert len(bench.backend.specs) == 1


async def test_images_that_have_what_is_missing_are_named(bench: Bench) -> None:
    bench.backend.with_modules = {"data": ("sklearn", "bs4"), "half": ("bs4",)}
    for image in ("data", "half"):
        await bench.create(image, "sklearn", "bs4", spec=replace(SPEC, image=image))
    session = await bench.create("r", "sklearn", "bs4")
    assert session.missing_modules == ("sklearn", "bs4")
    assert session.images_with_missing == ("data",)
    assert (await bench.create("unknown", "polars")).images_with_missing == ()


async def test_modules_of_tools_are_added_and_not_authorized(bench: Bench) -> None:
    policy = bench.follow("cv2")
    session = await bench.create("r", modules=("cv2.dnn",))
    assert policy.asked == ["cv2.dnn"], "the first name alone may be in many packages"
    assert requirements(session) == ("dist-cv2",)
    assert session.spec.authorized_imports == ()


async def test_a_prelude_that_imports_what_is_added_runs(bench: Bench) -> None:
    bench.backend.prelude_needs = "sklearn"
    with pytest.raises(InvalidRequest, match="the prelude fails"):
        await bench.create("without", "sklearn", prelude="import sklearn")
    bench.follow("sklearn")
    session = await bench.create("r", "sklearn", prelude="import sklearn")
    assert requirements(session) == ("dist-sklearn",)


async def test_packages_that_can_not_be_had_are_a_refusal_and_leave_nothing(bench: Bench) -> None:
    bench.follow("sklearn")
    bench.backend.failure = EnvironmentFailed("no wheel of it fits Python 3.11")
    for _ in range(2):
        with pytest.raises(PreconditionFailed) as refused:
            await bench.create("r", "sklearn")
        assert refused.value.reason is Reason.ENVIRONMENT_FAILED
        assert refused.value.message == "no wheel of it fits Python 3.11"
    assert not bench.backend.living and bench.manager.list(ALICE) == []
    assert len(bench.backend.specs) == 1, "the second attempt needed no sandbox to know"


async def test_the_packages_of_a_session_outlive_the_daemon(bench: Bench) -> None:
    packages = PackagesSpec(("polars>=1",), exclude_newer_s=86_400.0, lock_file="/etc/x.toml", lock_sha256="ab")
    session = await bench.create("r", spec=replace(SPEC, packages=packages))
    (record,) = bench.registry.load()
    assert record.spec == session.spec
    assert record.spec.sandbox.packages == packages
