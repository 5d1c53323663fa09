"""The queue of builds: one for each request and each environment, a bounded number at a time, with a timeout.

Theory of operation. A build is a task for one request; repeated requests get its progress. It waits for its turn,
fairly among tenants, resolves the request unless its lock is known, and builds the lock's environment. If another build
is building the same environment, it waits for that one.

Failures are remembered for a while, so that clients that repeat a request get the failure and cause no build. A failure
caused by the packages is remembered longer than a temporary one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from executor_api.disk import is_disk_full
from executor_server.core import EnvironmentFailed, ExecutorError, ImageNotReady, Progress, SandboxFailure
from executor_server.core.config import DAY_S
from executor_server.core.fairness import FairSemaphore
from executor_server.packages import refusals
from executor_server.packages.build import Builder
from executor_server.packages.catalog import Catalog
from executor_server.packages.index import Request
from executor_server.packages.lock import Lock
from executor_server.packages.observer import BuildEnd, EnvironmentObserver, EnvironmentUse, Outcome

MAX_QUEUED = 256
"""Builds that wait for their turn."""
MAX_QUEUED_OF_TENANT = 64
"""Likewise those that one tenant was the first to request: it must leave room for the others."""
FAILED_S = 60.0
"""Seconds for which a temporary failure is remembered."""
REFUSED_S = 600.0
"""Seconds for which a failure caused by the packages is remembered; the index or the policy may change."""
_MAX_FAILURES = 1024

_QUEUED = Progress("waiting for other environments")
_CHECKING = Progress("checking")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class EnvironmentSettings:
    """The limits of builds and of the store ([environments] of the configuration)."""

    max_bytes: int = 20 * 2**30  # on disk, of environments, wheels and running builds together
    build_timeout_s: float = 600.0
    concurrency: int = 2  # builds at a time
    lock_lifetime_s: float = 7 * DAY_S  # for which the same request gets the same versions


@dataclass(eq=False)
class Build:
    """One build, and its progress."""

    request: Request
    use: EnvironmentUse
    is_refresh: bool
    begun_at: float = field(default_factory=time.monotonic)
    has_turn: bool = False
    lock: Lock | None = None
    following: Build | None = None  # another build of the same environment, which it waits for
    task: asyncio.Task[None] | None = None
    _progress: Progress = _QUEUED

    @property
    def progress(self) -> Progress:
        return self._progress if self.following is None else self.following.progress

    def note(self, progress: Progress) -> None:
        self._progress = progress


@dataclass(frozen=True)
class _Failure:
    text: str
    is_final: bool
    retries: bool
    until: float  # in monotonic seconds

    def error(self) -> ImageNotReady:
        if self.is_final:
            return EnvironmentFailed(self.text)
        if not self.retries:
            return ImageNotReady(self.text)
        return ImageNotReady(self.text, retry_after_s=max(refusals.RETRY_S, self.until - time.monotonic()))


class Builds:
    """Owns the builds. Belongs to the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        builder: Builder,
        settings: EnvironmentSettings,
        observer: EnvironmentObserver,
        on_made: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._builder = builder
        self._settings = settings
        self._observer = observer
        self._on_made = on_made
        self._builds: dict[tuple[Request, bool], Build] = {}  # by the request, and whether it is refreshed
        self._making: dict[str, Build] = {}  # by the environment that they make
        self._failures: OrderedDict[tuple[Request, bool], _Failure] = OrderedDict()
        self._turns = FairSemaphore(settings.concurrency)

    # -- for the service -----------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> list[Build]:
        return list(self._builds.values())

    @property
    def queued(self) -> int:
        return sum(not build.has_turn for build in self.under_way)

    def failure_of(self, request: Request) -> ImageNotReady | None:
        """Returns the remembered failure of a request."""
        failure = self._failure(request, is_refresh=False)
        return None if failure is None else failure.error()

    def forget_failures(self) -> None:
        """Lets every request be tried again."""
        self._failures.clear()

    def of(self, request: Request, use: EnvironmentUse) -> Build:
        """Returns the build of a request, begun now unless it is under way. Raises ImageNotReady when too many wait."""
        build = self._builds.get((request, False))
        if build is None:
            if (queued := self._queued_of(use.requester)) >= MAX_QUEUED_OF_TENANT:
                raise refusals.queue_full(request.packages.requirements, f"{queued} others of this tenant")
            if self.queued >= MAX_QUEUED:
                raise refusals.queue_full(request.packages.requirements, f"{self.queued} others")
            build = self._begin(Build(request, use, is_refresh=False))
        return build

    def refresh(self, request: Request, use: EnvironmentUse) -> None:
        """Resolves a request again in the background, unless that is under way or failed recently."""
        may_begin = (request, True) not in self._builds and self._failure(request, is_refresh=True) is None
        has_room = self.queued < MAX_QUEUED and self._queued_of(use.requester) < MAX_QUEUED_OF_TENANT
        if may_begin and has_room:
            self._begin(Build(request, use, is_refresh=True))

    def _queued_of(self, requester: str) -> int:
        return sum(not build.has_turn and build.use.requester == requester for build in self.under_way)

    async def close(self) -> None:
        """Cancels all builds, and waits until they have cleaned up."""
        tasks = [build.task for build in self.under_way if build.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one build ---------------------------------------------------------------------------------------------------

    def _begin(self, build: Build) -> Build:
        key = (build.request, build.is_refresh)

        async def run() -> None:
            try:
                await self._run(build)
            finally:
                del self._builds[key]

        self._builds[key] = build
        build.task = asyncio.create_task(run(), name=f"environment {refusals.name_of(build.use.requirements)}")
        return build

    async def _run(self, build: Build) -> None:
        """Provides the environment of a request, or notes the failure. The border of a background task."""
        started = time.monotonic()
        outcome: Outcome = "cancelled"
        error = ""
        try:
            if not build.is_refresh:  # else the request has found the environment
                if await self._is_answered(build):
                    return
                self._observer.environment_missed(build.use)
            async with self._turns.hold(build.use.requester):
                build.has_turn = True
                started = time.monotonic()
                self._observer.build_started(build.use)
                outcome = await self._build_in_time(build)
        except ImageNotReady as refusal:
            outcome, error = _outcome_of(refusal), str(refusal)
            self._note_failure(build, refusal)
        except (ExecutorError, SandboxFailure, OSError) as failure:
            outcome, error = "failed", self._explained(failure, build)
            self._note_failure(build, ImageNotReady(error, FAILED_S))
        except Exception:  # noqa: BLE001 - the border of this task: the error would be lost
            _log.exception("environment_build_failed", requirements=build.use.requirements)
            outcome, error = "failed", refusals.not_made(build.use.requirements, refusals.SEE_THE_LOG)
            self._note_failure(build, ImageNotReady(error, FAILED_S))
        finally:
            if build.has_turn:
                self._report(build, outcome, error, time.monotonic() - started)

    async def _is_answered(self, build: Build) -> bool:
        """True if the request has a ready environment; checks it first if necessary."""
        answer = self._catalog.index.find(build.request)
        if answer is None:
            return False
        build.note(_CHECKING)
        is_ready = await self._catalog.check(answer.environment_id)
        build.note(_QUEUED)
        return is_ready

    async def _build_in_time(self, build: Build) -> Outcome:
        timeout_s = self._settings.build_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._build(build)
        except TimeoutError as error:
            if not limit.expired():
                raise
            why = refusals.too_slow(build.progress, timeout_s)
            raise _TooSlow(refusals.not_made(build.use.requirements, why), FAILED_S) from error

    async def _build(self, build: Build) -> Outcome:
        catalog, request = self._catalog, build.request
        resolved_s = catalog.now()
        answer = catalog.index.find(request)
        if answer is not None and not build.is_refresh and not self.is_due(answer.resolved_s):
            # The environment was evicted or damaged; the same lock gives the same environment.
            build.lock, resolved_s = answer.lock, answer.resolved_s
        if build.lock is None:
            build.lock = await self._builder.resolve(request.packages, request.target, build.note)
            resolved_s = catalog.now()
        outcome: Outcome = "reused"
        environment_id = build.lock.environment_id
        await self._follow_others(build, environment_id)
        if not await catalog.check(environment_id):
            self._making[environment_id] = build
            try:
                await catalog.make(self._builder, build.lock, request, build.note)
            finally:
                del self._making[environment_id]
            outcome = "made"
        catalog.index.note_answer(request, build.lock, resolved_s)
        self._failures.pop((request, build.is_refresh), None)
        self._on_made()
        return outcome

    async def _follow_others(self, build: Build, environment_id: str) -> None:
        """Waits until no other build of the environment runs, however it ends."""
        while (other := self._making.get(environment_id)) is not None and other.task is not None:
            build.following = other
            try:
                await asyncio.wait({other.task})
            finally:
                build.following = None

    def is_due(self, resolved_s: float) -> bool:
        """True when a lock of this age must be resolved again."""
        return not 0 <= self._catalog.now() - resolved_s < self._settings.lock_lifetime_s

    # -- how it ended --------------------------------------------------------------------------------------------------

    def _explained(self, failure: Exception, build: Build) -> str:
        if isinstance(failure, ExecutorError):  # no turn
            return failure.message
        _log.error("environment_build_failed", requirements=build.use.requirements, error=str(failure))
        why = refusals.NO_SPACE if is_disk_full(failure) or self._catalog.is_disk_full() else refusals.SEE_THE_LOG
        return refusals.not_made(build.use.requirements, why)

    def _note_failure(self, build: Build, error: ImageNotReady) -> None:
        is_final = isinstance(error, EnvironmentFailed)
        until = time.monotonic() + (REFUSED_S if is_final else error.retry_after_s or FAILED_S)
        retries = error.retry_after_s is not None
        self._failures[build.request, build.is_refresh] = _Failure(str(error), is_final, retries, until)
        while len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _failure(self, request: Request, *, is_refresh: bool) -> _Failure | None:
        failure = self._failures.get((request, is_refresh))
        if failure is not None and time.monotonic() >= failure.until:
            del self._failures[request, is_refresh]
            return None
        return failure

    def _report(self, build: Build, outcome: Outcome, error: str, took_s: float) -> None:
        manifest = None if build.lock is None else self._catalog.store.manifests.get(build.lock.environment_id)
        _log.info(
            "environment_build_ended",
            outcome=outcome,
            environment_id=None if build.lock is None else build.lock.environment_id,
            tenant=build.use.requester,
            refresh=build.is_refresh,
            took_ms=round(took_s * 1000),
        )
        size_bytes = 0 if manifest is None else manifest.size_bytes
        self._observer.build_ended(BuildEnd(build.use, build.lock, outcome, took_s, size_bytes, error))


class _TooSlow(ImageNotReady):
    """A build exceeded its time limit."""


def _outcome_of(refusal: ImageNotReady) -> Outcome:
    if isinstance(refusal, _TooSlow):
        return "timed out"
    return "refused" if isinstance(refusal, EnvironmentFailed) else "failed"
