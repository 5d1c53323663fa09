"""Several backends as one: each new sandbox is made by the first backend of its spec that is neither full nor down.

A backend that is down is passed over for a time that grows, with jitter, up to a bound; then a single creation tries it
while the others still pass it over. So a dead Engine costs one time-out now and then, and not one per session. A full
backend is passed over until the time that it named (health.py). A sandbox stays where it was made.

A backend that can't be started does not keep the others from serving. Each sweep tries to start it again; once started,
it destroys the sandboxes that an earlier daemon left on it. If sessions have sandboxes there, the daemon's start waits
for the backend for a while, and then declares these sessions lost. A start that hangs is not cancelled but awaited
again by the next sweep: a cancelled one may keep locks that the next start needs.

This module knows neither sessions nor policies, nor how backends differ.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from executor_server.backends import (
    Backend,
    Environment,
    HostFinding,
    KnownSandbox,
    MissingSandbox,
    Sandbox,
    failures_of,
    outcomes_of,
)
from executor_server.core import BackendFull, EnvironmentFailed, ImageNotReady, SandboxFailure, SandboxSpec
from executor_server.sessions.pool.health import BackendHealth, HealthSettings

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FailOverSettings:
    """Seconds for which a backend is passed over, and for which the start waits for one that has known sandboxes.

    `sweep_wait_s`: seconds for which a sweep waits for a backend's start.
    """

    health: HealthSettings = field(default_factory=HealthSettings)
    adopt_wait_s: float = 15.0
    adopt_retry_s: float = 1.0
    sweep_wait_s: float = 15.0


class BackendSet:
    """Implements `executor_server.backends.base.Backend`. The first of `backends` is the daemon's own."""

    def __init__(
        self,
        backends: Sequence[Backend],
        settings: FailOverSettings | None = None,
        *,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """`now_s`: a monotonic clock; None: the event loop's."""
        assert backends, "a set of backends has one"
        self._settings = settings or FailOverSettings()
        clock = now_s or (lambda: asyncio.get_running_loop().time())
        self._members = {
            backend.name: _Member(backend, BackendHealth(backend.name, self._settings.health, clock))
            for backend in backends
        }
        assert len(self._members) == len(backends), "each backend is there once"

    @property
    def name(self) -> str:
        return ",".join(self._members)

    def states(self) -> Mapping[str, str]:
        """Returns for each backend `up`, `full` or `down`, as its last creation found it."""
        return {name: member.state for name, member in self._members.items()}

    def members(self) -> Sequence[Backend]:
        return [member.backend for member in self._members.values()]

    async def start(self) -> None:
        """Starts all. Raises SandboxFailure when none starts."""
        failures = await failures_of(member.start() for member in self._members.values())
        if len(failures) == len(self._members):
            raise _most_helpful(list(zip(self._members, failures, strict=True)))

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        """Adopts the sandboxes of each backend; those of a backend that can't be used become MissingSandbox."""
        async with asyncio.TaskGroup() as adoptions:
            tasks = [
                adoptions.create_task(self._adopt(member, [each for each in known if each.backend == name]))
                for name, member in self._members.items()
            ]
        return {sandbox_id: sandbox for task in tasks for sandbox_id, sandbox in task.result().items()}

    async def _adopt(self, member: _Member, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        if not known and not member.is_started:
            return {}  # no session waits for it: the next sweep starts it
        deadline_s = asyncio.get_running_loop().time() + self._settings.adopt_wait_s
        while True:
            try:
                return await member.take_over(known, deadline_s)
            except SandboxFailure:  # logged by the member
                if not known or asyncio.get_running_loop().time() >= deadline_s:
                    reason = f"its backend {member.name} could not be used when the daemon came back"
                    return {each.sandbox_id: MissingSandbox(each.sandbox_id, each.backend, reason) for each in known}
                await asyncio.sleep(self._settings.adopt_retry_s)

    async def sweep(self) -> int:
        """Sweeps all, and starts those that could not be started before. Logs failures instead of raising them."""
        deadline_s = asyncio.get_running_loop().time() + self._settings.sweep_wait_s
        results = await outcomes_of(member.sweep(deadline_s) for member in self._members.values())
        return sum(result for result in results if not isinstance(result, SandboxFailure))

    async def fingerprint(self, spec: SandboxSpec) -> str:
        """Returns the fingerprint that a sandbox of the first working backend would have."""
        members = self._members_for(spec)
        first = next((member for member in members if member.is_well(spec)), members[0])
        return await first.fingerprint(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Creates on the first backend that can. Raises the failure that helps the caller most when none can."""
        return await self.create_with(spec, _as_it_is)

    async def create_with(self, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Does what the function `create_with` does."""
        failures: list[tuple[str, SandboxFailure]] = []
        for member in self._members_for(spec):
            try:
                return await member.create_with(spec, use)
            except SandboxFailure as failure:
                if _is_about_packages(failure):
                    raise
                failures.append((member.name, failure))
        raise _most_helpful(failures)

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        """Prepares it on the first backend that can. Raises as `create`."""
        failures: list[tuple[str, SandboxFailure]] = []
        for member in self._members_for(spec):
            try:
                return await member.prepare_environment(spec)
            except SandboxFailure as failure:
                if _is_about_packages(failure):
                    raise
                failures.append((member.name, failure))
        raise _most_helpful(failures)

    async def check_host(self) -> Sequence[HostFinding]:
        """Returns the findings of all, each with its backend's name."""
        return [
            replace(finding, subject=f"{name}: {finding.subject}")
            for name, member in self._members.items()
            for finding in await member.backend.check_host()
        ]

    async def close(self) -> None:
        """Closes all, also when some fail. Raises SandboxFailure."""
        failures = await failures_of(member.close() for member in self._members.values())
        if failures:
            raise SandboxFailure("; ".join(map(str, failures))) from failures[0]

    def _members_for(self, spec: SandboxSpec) -> list[_Member]:
        """Returns the spec's backends; never none, since the policy names only configured ones."""
        return [self._members[name] for name in spec.backends or (next(iter(self._members)),)]


async def create_with(backend: Backend, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[T]]) -> T:
    """Creates a sandbox and returns what `use` makes of it. `use` destroys it when it raises SandboxFailure.

    With several backends, such a failure counts as a failed creation: the next backend is asked, and this one is passed
    over for a time. Raises as `Backend.create`.
    """
    if isinstance(backend, BackendSet):
        return await backend.create_with(spec, use)
    return await use(await backend.create(spec))


async def _as_it_is(sandbox: Sandbox) -> Sandbox:
    return sandbox


class _Member:
    """One backend of the set: its start, its sweeps, its health."""

    def __init__(self, backend: Backend, health: BackendHealth) -> None:
        self.backend = backend
        self.name = backend.name
        self._health = health
        self.is_started = False
        self._late_start: asyncio.Task[None] | None = None  # goes on when its waiter has stopped waiting
        self._serves = False  # True once it is started and an earlier daemon's sandboxes are taken over
        self._logged = ""  # the last failure to start or sweep

    @property
    def state(self) -> str:
        return self._health.state if self._serves else "down"

    def is_well(self, spec: SandboxSpec) -> bool:
        return self._serves and self._health.is_well(spec)

    # -- starting and sweeping ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        try:
            await self.backend.start()
        except SandboxFailure as failure:
            self._log_once("backend_not_started", failure)
            raise
        self.is_started = True

    async def _start_by(self, deadline_s: float) -> None:
        """Waits for a start until the deadline; the start itself goes on afterwards. Raises SandboxFailure."""
        if self._late_start is None:
            self._late_start = asyncio.create_task(self.start(), name=f"start of {self.name}")
        left_s = deadline_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait([self._late_start], timeout=left_s)
        if not done:
            late = SandboxFailure("it has not started yet")
            self._log_once("backend_not_started", late)
            raise late
        ended, self._late_start = self._late_start, None
        ended.result()

    async def take_over(self, known: Sequence[KnownSandbox], deadline_s: float) -> Mapping[str, Sandbox]:
        """Takes over what an earlier daemon left; starts the backend before, if needed. Raises SandboxFailure.

        Waits for a start until `deadline_s`, by the event loop's clock.
        """
        if not self.is_started:
            await self._start_by(deadline_s)
        try:
            adopted = await self.backend.adopt(known)
        except SandboxFailure as failure:
            self._log_once("backend_not_taken_over", failure)
            raise
        if self._logged:
            _log.warning("backend_started", backend=self.name)
        self._serves, self._logged = True, ""
        return adopted

    async def sweep(self, deadline_s: float) -> int:
        """Sweeps, or starts the backend first. Waits for a start until the deadline: others are swept, too."""
        if not self._serves:
            # The sessions of its sandboxes were declared lost at the daemon's start, so all of these are destroyed.
            await self.take_over((), deadline_s)
            return 0
        try:
            found = await self.backend.sweep()
        except SandboxFailure as failure:
            self._log_once("backend_not_swept", failure)
            raise
        self._logged = ""
        return found

    async def close(self) -> None:
        """Closes it, and cancels a start that still goes on. Raises SandboxFailure."""
        if self._late_start is not None:
            self._late_start.cancel()
            await asyncio.gather(self._late_start, return_exceptions=True)
        await self.backend.close()

    def _log_once(self, event: str, failure: SandboxFailure) -> None:
        """Logs a failure unless the same text was logged last."""
        if str(failure) != self._logged:
            self._logged = str(failure)
            _log.warning(event, backend=self.name, error=str(failure))

    # -- making sandboxes --------------------------------------------------------------------------------------------

    async def fingerprint(self, spec: SandboxSpec) -> str:
        self._check_serves()
        return await self.backend.fingerprint(spec)

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        self._check_serves()
        return await self.backend.prepare_environment(spec)

    async def create_with(self, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Creates a sandbox. Raises SandboxFailure, at once while the backend is passed over."""
        self._check_serves()
        with self._health.attempt(spec):
            return await use(await self.backend.create(spec))

    def _check_serves(self) -> None:
        if not self._serves:
            raise SandboxFailure(f"the {self.name} backend does not run: {self._logged}")


def _is_about_packages(failure: SandboxFailure) -> bool:
    """Returns True when no other backend should be asked: the packages are at fault, or this backend is building their
    environment, and another one would build it a second time."""
    return isinstance(failure, EnvironmentFailed) or (
        isinstance(failure, ImageNotReady) and failure.progress is not None
    )


def _most_helpful(failures: Sequence[tuple[str, SandboxFailure]]) -> SandboxFailure:
    """Returns the failure that helps the caller most: one that names a time to wait, if there is one."""
    if len(failures) == 1:
        return failures[0][1]
    unready = [failure for _, failure in failures if isinstance(failure, ImageNotReady)]
    full = [failure for _, failure in failures if isinstance(failure, BackendFull)]
    if unready and not full:  # this text is for the client, so those of the others are left out
        return min(unready, key=lambda failure: math.inf if failure.retry_after_s is None else failure.retry_after_s)
    text = "; ".join(f"{name}: {failure}" for name, failure in failures)
    whole = BackendFull(text, min(each.retry_after_s for each in full)) if full else SandboxFailure(text)
    whole.__cause__ = failures[0][1]
    return whole
