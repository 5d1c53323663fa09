"""Several backends as one: each new sandbox is made by the first of its spec's that is neither full nor down.

One that is down is passed over for a time that grows, with jitter, to a bound; then a single creation tries it, while
the others still pass it over. So a dead Engine costs one time-out now and then and not one for each session. One that
is full is passed over until the time that it gave itself (backend_health.py). A sandbox stays where it was made.

One that can't be started keeps no other from serving: it is tried again at each sweep, and destroys then what an
earlier daemon left of it. Where somebody has a session it is waited for, a while, and the session is told that it is
lost if that was in vain. A start that hangs goes on meanwhile, for the next sweep: one that is cut off may keep what
the next one needs.

Not known here: sessions, policies, and what makes the backends different.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from executor_server.backend_health import BackendHealth, HealthSettings
from executor_server.backends.base import Backend, HostFinding, KnownSandbox, Sandbox
from executor_server.backends.endings import failures_of, outcomes_of
from executor_server.backends.gone import GoneSandbox
from executor_server.errors import BackendFull, ImageNotReady, SandboxFailure
from executor_server.model import SandboxSpec

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FailOverSettings:
    """How long a backend is passed over, and how long one is waited for that an earlier daemon's sessions are on."""

    health: HealthSettings = field(default_factory=HealthSettings)
    adopt_wait_s: float = 15.0
    adopt_retry_s: float = 1.0


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
        """Of each backend whether it is `up`, `full` or `down`, as far as it is known."""
        return {name: member.state for name, member in self._members.items()}

    async def start(self) -> None:
        """Starts all. Raises SandboxFailure when none can be."""
        failures = await failures_of(member.start() for member in self._members.values())
        if len(failures) == len(self._members):
            raise _most_telling(list(zip(self._members, failures, strict=True)))

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        """As `Backend.adopt`, of each backend its own. Those of one that can't be used are there as GoneSandbox."""
        async with asyncio.TaskGroup() as adoptions:
            tasks = [
                adoptions.create_task(self._adopt(member, [each for each in known if each.backend == name]))
                for name, member in self._members.items()
            ]
        return {sandbox_id: sandbox for task in tasks for sandbox_id, sandbox in task.result().items()}

    async def _adopt(self, member: _Member, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        if not known and not member.is_started:
            return {}  # nobody waits for it: the next sweep starts it
        deadline_s = asyncio.get_running_loop().time() + self._settings.adopt_wait_s
        while True:
            try:
                return await member.take_over(known, deadline_s)
            except SandboxFailure:  # it has been told of
                if not known or asyncio.get_running_loop().time() >= deadline_s:
                    reason = f"its backend {member.name} could not be used when the daemon came back"
                    return {each.sandbox_id: GoneSandbox(each.sandbox_id, each.backend, reason) for each in known}
                await asyncio.sleep(self._settings.adopt_retry_s)

    async def sweep(self) -> int:
        """As `Backend.sweep`, of all; starts those that could not be started.

        Raises nothing, or those that are late would have to wait longer for the trouble of others; the log is told.
        """
        results = await outcomes_of(member.sweep() for member in self._members.values())
        return sum(result for result in results if not isinstance(result, SandboxFailure))

    async def fingerprint(self, spec: SandboxSpec) -> str:
        """Of what the first backend that works would make."""
        members = self._members_for(spec)
        first = next((member for member in members if member.is_well(spec)), members[0])
        return await first.fingerprint(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Raises, when none makes it, the failure that says most of what the caller can do."""
        return await self.create_with(spec, _as_it_is)

    async def create_with(self, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        """As the function `create_with`."""
        failures: list[tuple[str, SandboxFailure]] = []
        for member in self._members_for(spec):
            try:
                return await member.create_with(spec, use)
            except SandboxFailure as failure:
                failures.append((member.name, failure))
        raise _most_telling(failures)

    async def check_host(self) -> Sequence[HostFinding]:
        """Of all, one after the other; each finding says whose it is."""
        return [
            replace(finding, subject=f"{name}: {finding.subject}")
            for name, member in self._members.items()
            for finding in await member.backend.check_host()
        ]

    async def close(self) -> None:
        """Closes all, whatever happens to one."""
        failures = await failures_of(member.close() for member in self._members.values())
        if failures:
            raise SandboxFailure("; ".join(map(str, failures))) from failures[0]

    def _members_for(self, spec: SandboxSpec) -> list[_Member]:
        """Never empty: the policy names what the configuration has."""
        return [self._members[name] for name in spec.backends or (next(iter(self._members)),)]


async def create_with(backend: Backend, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[T]]) -> T:
    """What comes of a new sandbox of `backend` by `use`, which destroys it when it raises SandboxFailure.

    Of several backends that failure counts as one to make the sandbox: the next one is asked, and the one whose sandbox
    was of no use is passed over from then on. Raises as `Backend.create`.
    """
    if isinstance(backend, BackendSet):
        return await backend.create_with(spec, use)
    return await use(await backend.create(spec))


async def _as_it_is(sandbox: Sandbox) -> Sandbox:
    return sandbox


class _Member:
    """One backend, and whether it is worth asking now."""

    def __init__(self, backend: Backend, health: BackendHealth) -> None:
        self.backend = backend
        self.name = backend.name
        self._health = health
        self.is_started = False
        self._late_start: asyncio.Task[None] | None = None  # that goes on, whoever has ceased to wait for it
        self._serves = False  # it is started, and nothing of an earlier daemon is in its way
        self._told = ""  # why it can't be started or swept, as it was logged

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
            self._tell("backend_not_started", failure)
            raise
        self.is_started = True

    async def _start_by(self, deadline_s: float | None) -> None:
        """Raises SandboxFailure, also when it is not started by then; it may be later."""
        if self._late_start is None:
            self._late_start = asyncio.create_task(self.start(), name=f"start of {self.name}")
        left_s = None if deadline_s is None else deadline_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait([self._late_start], timeout=left_s)
        if not done:
            late = SandboxFailure("it has not started yet")
            self._tell("backend_not_started", late)
            raise late
        ended, self._late_start = self._late_start, None
        ended.result()

    async def take_over(self, known: Sequence[KnownSandbox], deadline_s: float | None = None) -> Mapping[str, Sandbox]:
        """Starts it, if need be, and takes over what an earlier daemon left. Raises SandboxFailure.

        Of the start no more than until `deadline_s` of the event loop is waited for.
        """
        if not self.is_started:
            await self._start_by(deadline_s)
        try:
            adopted = await self.backend.adopt(known)
        except SandboxFailure as failure:
            self._tell("backend_not_taken_over", failure)
            raise
        if self._told:
            _log.warning("backend_started", backend=self.name)
        self._serves, self._told = True, ""
        return adopted

    async def sweep(self) -> int:
        if not self._serves:
            # The sessions that its sandboxes had are lost by now, and their owners know: it destroys them all.
            await self.take_over(())
            return 0
        try:
            found = await self.backend.sweep()
        except SandboxFailure as failure:
            self._tell("backend_not_swept", failure)
            raise
        self._told = ""
        return found

    async def close(self) -> None:
        """Raises SandboxFailure. Ends a start that still goes on."""
        if self._late_start is not None:
            self._late_start.cancel()
            await asyncio.gather(self._late_start, return_exceptions=True)
        await self.backend.close()

    def _tell(self, event: str, failure: SandboxFailure) -> None:
        """Once for each thing that there is to be said."""
        if str(failure) != self._told:
            self._told = str(failure)
            _log.warning(event, backend=self.name, error=str(failure))

    # -- making sandboxes --------------------------------------------------------------------------------------------

    async def fingerprint(self, spec: SandboxSpec) -> str:
        self._check_serves()
        return await self.backend.fingerprint(spec)

    async def create_with(self, spec: SandboxSpec, use: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Raises SandboxFailure, at once where it is known not to be worth asking."""
        self._check_serves()
        with self._health.attempt(spec):
            return await use(await self.backend.create(spec))

    def _check_serves(self) -> None:
        if not self._serves:
            raise SandboxFailure(f"the {self.name} backend does not run: {self._told}")


def _most_telling(failures: Sequence[tuple[str, SandboxFailure]]) -> SandboxFailure:
    """Of backends by name. Where one is only full, or its image only not there yet, waiting may help."""
    if len(failures) == 1:
        return failures[0][1]
    unready = [failure for _, failure in failures if isinstance(failure, ImageNotReady)]
    full = [failure for _, failure in failures if isinstance(failure, BackendFull)]
    if unready and not full:  # whose text is for the client, so the others' is left out
        return min(unready, key=lambda failure: math.inf if failure.retry_after_s is None else failure.retry_after_s)
    told = "; ".join(f"{name}: {failure}" for name, failure in failures)
    whole = BackendFull(told, min(each.retry_after_s for each in full)) if full else SandboxFailure(told)
    whole.__cause__ = failures[0][1]
    return whole
