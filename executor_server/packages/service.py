"""The service of environments, for backends and administrators.

It opens its directory at the first request, or at the start if an earlier daemon has left one. If no client asks for
packages, only this object exists. The builder is set later than the rest, since it needs the backends' sandboxes and
the backends need the service.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.backends import Environment, Target
from executor_server.core import PackagesSpec, Progress, SandboxFailure
from executor_server.packages import refusals
from executor_server.packages.build import Builder
from executor_server.packages.build_queue import Build, Builds, EnvironmentSettings
from executor_server.packages.catalog import Catalog, Collected
from executor_server.packages.disk import Places
from executor_server.packages.index import Request
from executor_server.packages.lock import Lock
from executor_server.packages.observer import (
    EnvironmentObserver,
    EnvironmentObservers,
    EnvironmentUse,
    current_requester,
)
from executor_server.packages.store import Store
from executor_server.packages.wheels import Wheels

# Seconds for which a request waits: often, the check of an environment is done by then.
_ANSWER_WAIT_S = 0.5
_NOT_OPEN = "the environments are not open"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class EnvironmentInfo:
    """One environment."""

    environment_id: str
    size_bytes: int
    created_s: float  # seconds since the epoch
    used_s: float  # the last use, in seconds since the epoch
    sandboxes: int  # the number of sandboxes that have it
    requesters: tuple[str, ...]  # tenants that used it, the most recent first
    requests: tuple[tuple[str, ...], ...]  # the requirements of its requests
    images: tuple[str, ...]  # of its requests, as "backend/image"
    pins: tuple[str, ...]
    modules: tuple[str, ...]
    lock: Lock


@dataclass(frozen=True)
class BuildInfo:
    """One running or queued build."""

    requirements: tuple[str, ...]
    backend: str
    image: str
    requester: str
    progress: Progress
    is_refresh: bool
    begun_s_ago: float


@dataclass(frozen=True)
class Statistics:
    """Current numbers."""

    environments: int = 0
    in_use: int = 0
    building: int = 0
    queued: int = 0
    total_bytes: int = 0  # on disk, of everything, as last measured
    max_bytes: int = 0


class EnvironmentService:
    """Implements `executor_server.backends.environments.Environments`. `root` is the directory of all environments."""

    def __init__(
        self,
        root: Path,
        settings: EnvironmentSettings,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.places = Places(root)
        self.wheels = Wheels(self.places)
        self._settings = settings
        self._observers = EnvironmentObservers()
        self._now = now
        self._builder: Builder | None = None
        self._parts: _Parts | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._collecting: asyncio.Task[None] | None = None
        self._is_collection_due = False

    def build_with(self, builder: Builder) -> None:
        """Sets the builder, before the first request."""
        self._builder = builder

    def notify(self, observer: EnvironmentObserver) -> None:
        """Adds an observer."""
        self._observers.add(observer)

    async def start(self) -> None:
        """Opens the directory of an earlier daemon, before backends adopt its sandboxes. Raises SandboxFailure."""
        if self.places.root.is_dir():
            await self._opened()

    async def close(self) -> None:
        """Ends running builds and closes the store. Idempotent."""
        self._closed = True
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.gather(self._collecting, return_exceptions=True)
        async with self._opening:
            parts, self._parts = self._parts, None
        if parts is not None:
            await parts.builds.close()
            await parts.catalog.close()

    # -- for backends ------------------------------------------------------------------------------------------------

    async def ready(self, packages: PackagesSpec, target: Target) -> Environment:
        parts = self._parts or await self._opened()
        request = Request(packages, target)
        use = EnvironmentUse(current_requester(), target.backend, target.image, packages.requirements)
        environment, build = parts.catalog.find(request), None
        if environment is None:
            if (failure := parts.builds.failure_of(request)) is not None:
                raise failure
            build = parts.builds.of(request, use)
            assert build.task is not None
            await asyncio.wait({build.task}, timeout=_ANSWER_WAIT_S)
            environment = parts.catalog.find(request)
            if environment is None:
                raise parts.builds.failure_of(request) or refusals.being_made(packages.requirements, build.progress)
        if build is None or not build.has_turn:  # without a turn it was only checked
            self._hit(parts, request, use, environment)
        elif build.use is not use:  # the build has counted the request that began it
            self._observers.environment_missed(use)
        if environment.size_bytes > packages.max_environment_bytes:
            raise refusals.too_large(packages.requirements, environment.size_bytes, packages.max_environment_bytes)
        return environment

    def hold(self, environment_id: str, backend: str, sandbox_id: str) -> None:
        if self._parts is None:
            raise SandboxFailure(_NOT_OPEN)
        self._parts.catalog.hold(environment_id, backend, sandbox_id)

    def release(self, sandbox_id: str) -> None:
        if self._parts is not None:
            self._parts.catalog.holds.release(sandbox_id)
            self._remove_damaged(self._parts.catalog)

    def held_by(self, sandbox_id: str) -> str:
        return "" if self._parts is None else self._parts.catalog.holds.of(sandbox_id)

    def keep_only(self, backend: str, sandbox_ids: Collection[str]) -> None:
        if self._parts is not None:
            self._parts.catalog.holds.keep_only(backend, sandbox_ids)
            self._remove_damaged(self._parts.catalog)

    # -- for administrators ------------------------------------------------------------------------------------------

    def list(self) -> Sequence[EnvironmentInfo]:
        """Returns all environments, the most recently used first."""
        if self._parts is None:
            return []
        catalog = self._parts.catalog
        return [_info(catalog, each) for each in sorted(catalog.store.manifests, key=catalog.used_s, reverse=True)]

    def show(self, environment_id: str) -> EnvironmentInfo | None:
        """Returns one environment; None for an unknown id."""
        if self._parts is None or environment_id not in self._parts.catalog.store.manifests:
            return None
        return _info(self._parts.catalog, environment_id)

    def builds(self) -> Sequence[BuildInfo]:
        """Returns the running and queued builds."""
        return [] if self._parts is None else [_build_info(each) for each in self._parts.builds.under_way]

    def statistics(self) -> Statistics:
        if self._parts is None:
            return Statistics(max_bytes=self._settings.max_bytes)
        catalog, under_way = self._parts.catalog, self._parts.builds.under_way
        building = sum(build.has_turn for build in under_way)
        return Statistics(
            environments=len(catalog.store.manifests),
            in_use=sum(catalog.holds.count(each) > 0 for each in catalog.store.manifests),
            building=building,
            queued=len(under_way) - building,
            total_bytes=catalog.total_bytes,
            max_bytes=self._settings.max_bytes,
        )

    async def collect(self, max_bytes: int = 0) -> Collected:
        """Removes unused environments and wheels, the least recently used first, until `max_bytes` are left on disk.

        Also forgets failed builds, so that they may be tried again. Raises SandboxFailure.
        """
        if self._parts is None:
            return Collected((), 0, 0)
        self._parts.builds.forget_failures()
        try:
            return await self._parts.catalog.collect(max_bytes, "an administrator made room")
        except OSError as error:
            raise SandboxFailure(f"the environments can't be measured or removed: {error}") from error

    # -----------------------------------------------------------------------------------------------------------------

    def _hit(self, parts: _Parts, request: Request, use: EnvironmentUse, environment: Environment) -> None:
        self._observers.environment_hit(use, environment.environment_id)
        answer = parts.catalog.index.find(request)
        if answer is not None and parts.builds.is_due(answer.resolved_s):
            parts.builds.refresh(request, use)

    async def _opened(self) -> _Parts:
        """Opens the directory, once. Raises SandboxFailure."""
        async with self._opening:
            if self._closed or self._builder is None:
                raise SandboxFailure(_NOT_OPEN)
            if self._parts is None:
                try:
                    store = Store(self.places)
                    await asyncio.to_thread(store.open)
                    catalog = Catalog(store, self.wheels, self._observers.environment_evicted, self._now)
                except (OSError, sqlite3.Error) as error:
                    raise SandboxFailure(f"the environments in {self.places.root} can't be opened: {error}") from error
                builds = Builds(catalog, self._builder, self._settings, self._observers, self._collect_soon)
                self._parts = _Parts(catalog, builds)
                self._collect_soon()
            return self._parts

    def _remove_damaged(self, catalog: Catalog) -> None:
        if catalog.store.damaged():
            self._collect_soon()

    def _collect_soon(self) -> None:
        """Makes room in the background if necessary: after each build, and when a damaged environment is unused."""
        self._is_collection_due = True
        if not self._closed and (self._collecting is None or self._collecting.done()):
            self._collecting = asyncio.get_running_loop().create_task(self._collect())

    async def _collect(self) -> None:
        while self._is_collection_due and self._parts is not None:
            self._is_collection_due = False
            try:
                await self._parts.catalog.collect(self._settings.max_bytes, "there was too little room")
            except OSError as error:
                _log.error("environments_not_collected", error=str(error))
                return


@dataclass(frozen=True)
class _Parts:
    """The parts of a service that is open."""

    catalog: Catalog
    builds: Builds


def _build_info(build: Build) -> BuildInfo:
    use = build.use
    return BuildInfo(
        requirements=use.requirements,
        backend=use.backend,
        image=use.image,
        requester=use.requester,
        progress=build.progress,
        is_refresh=build.is_refresh,
        begun_s_ago=time.monotonic() - build.begun_at,
    )


def _info(catalog: Catalog, environment_id: str) -> EnvironmentInfo:
    manifest = catalog.store.manifests[environment_id]
    requests = catalog.index.requests_of(environment_id)
    return EnvironmentInfo(
        environment_id=environment_id,
        size_bytes=manifest.size_bytes,
        created_s=manifest.created_s,
        used_s=catalog.used_s(environment_id),
        sandboxes=catalog.holds.count(environment_id),
        requesters=tuple(catalog.index.requesters_of(environment_id)),
        requests=tuple(dict.fromkeys(each.requirements for each in requests)),
        images=tuple(dict.fromkeys(each.image for each in requests)),
        pins=manifest.pins,
        modules=manifest.modules,
        lock=manifest.lock,
    )
