"""The existing environments, with their requests, users and last uses.

An environment is ready when this daemon has built it or checked each byte of it. Then a request for it costs a few
dictionary look-ups, and one `stat`, since a person may have removed the directory.

For the event loop, except for methods that block.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from executor_server.backends import Environment
from executor_server.core import Progress, SandboxFailure
from executor_server.packages.build import Builder, OnProgress
from executor_server.packages.disk import Stopped, Walk, remove, to_its_end, volume_of
from executor_server.packages.holds import Holds
from executor_server.packages.index import Index, Request
from executor_server.packages.lock import Lock
from executor_server.packages.observer import current_requester
from executor_server.packages.store import TREE, Damaged, Manifest, Store, digest_of
from executor_server.packages.wheels import Wheels

# Seconds after an answer for which the environment is kept: its sandbox holds it only when it is created.
_ANSWER_S = 120.0
# Seconds after which a further use of an environment is recorded.
_USE_INTERVAL_S = 60.0
_CONCURRENT_CHECKS = 2  # each reads as fast as the disk can
_FULL_BELOW_BYTES = 4 * 2**20

_log = structlog.get_logger(__name__)

OnRemoved = Callable[[str, int, str], None]
"""Called with an environment's id, the bytes that its removal freed, and the reason."""


@dataclass(frozen=True)
class Evicted:
    environment_id: str
    freed_bytes: int


@dataclass(frozen=True)
class Collected:
    """The result of making room."""

    evicted: tuple[Evicted, ...]
    freed_bytes: int  # on disk, wheels included
    total_bytes: int  # on disk, afterwards


class Catalog:
    """Owns store, index and holds."""

    def __init__(self, store: Store, wheels: Wheels, on_removed: OnRemoved, now: Callable[[], float]) -> None:
        """Takes an open store, and closes it in every case. `now` returns seconds since the epoch.

        Raises OSError, sqlite3.Error.
        """
        self.now = now
        self.store = store
        self.total_bytes = 0
        """Bytes on disk at the last measurement."""
        self._wheels = wheels
        self._on_removed = on_removed
        try:
            self.holds = Holds(store.places.holds)
            self.index = Index(store.places.index)
        except BaseException:
            self.store.close()
            raise
        self._ready: dict[str, Environment] = {}
        self._answered_at: dict[str, float] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._walk = Walk()  # of all checks
        self._checking = asyncio.Semaphore(_CONCURRENT_CHECKS)
        self._collecting = asyncio.Lock()

    async def close(self) -> None:
        """Ends the checks, and closes what it owns."""
        self._walk.is_stopped = True
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        self.index.close()
        self.store.close()

    def is_disk_full(self) -> bool:
        try:
            return shutil.disk_usage(self.store.places.root).free < _FULL_BELOW_BYTES
        except OSError:
            return False

    # -- answering ---------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Environment | None:
        """Returns the environment of a request if it is ready, and protects it from eviction for a while."""
        answer = self.index.find(request)
        environment = None if answer is None else self._ready.get(answer.environment_id)
        if environment is None:
            return None
        if not environment.directory.is_dir():
            _log.error("environment_missing", environment_id=environment.environment_id)
            self._take_out(environment.environment_id)
            return None
        self._answered_at[environment.environment_id] = time.monotonic()
        self._note_use(environment.environment_id)
        return environment

    def _note_use(self, environment_id: str) -> None:
        now, requester = self.now(), current_requester()
        if now - self.index.used_s_by(environment_id, requester) >= _USE_INTERVAL_S:
            self.index.note_use(environment_id, requester, now)

    async def make(self, builder: Builder, lock: Lock, request: Request, on_progress: OnProgress) -> None:
        """Builds the environment of a lock and publishes it, or leaves nothing. Raises what the builder raises."""
        staging, walk = self.store.stage(), Walk()
        try:
            built = await builder.make(lock, request.packages, request.target, staging / TREE, on_progress)
            on_progress(Progress("checking"))
            digest = await to_its_end(walk, lambda: digest_of(staging / TREE, walk))
            manifest = Manifest(lock, built.modules, built.pins, built.size_bytes, self.now(), digest)
            await asyncio.to_thread(manifest.write, staging)
            self.store.publish(staging, manifest)
        except BaseException:
            await to_its_end(walk, lambda: remove(staging))
            raise
        self._accept(manifest)

    def _accept(self, manifest: Manifest) -> None:
        self._ready[manifest.environment_id] = Environment(
            environment_id=manifest.environment_id,
            directory=self.store.tree_of(manifest.environment_id),
            size_bytes=manifest.size_bytes,
            modules=manifest.modules,
            pins=manifest.pins,
        )

    def _is_ready(self, environment_id: str) -> bool:
        return environment_id in self._ready and self.store.is_there(environment_id)

    async def check(self, environment_id: str) -> bool:
        """Returns True if the environment is ready; checks it now if this daemon has not checked it yet.

        If it does not match its manifest, it is put aside, and removed when no sandbox has it mounted.
        """
        if self._is_ready(environment_id):
            return True
        if not self.store.is_there(environment_id):
            return False
        check = self._checks.get(environment_id)
        if check is None:
            check = self._checks[environment_id] = asyncio.create_task(self._check(environment_id))
            check.add_done_callback(lambda _: self._checks.pop(environment_id))
        return await asyncio.shield(check)

    async def _check(self, environment_id: str) -> bool:
        started = time.monotonic()
        try:
            async with self._checking:
                await asyncio.to_thread(self.store.check, environment_id, self._walk)
        except Stopped:
            return False
        except Damaged as error:
            in_use = self.holds.count(environment_id)
            _log.error("environment_damaged", environment_id=environment_id, error=str(error), in_use_by=in_use)
            self._forget(environment_id)
            self.store.put_aside(environment_id)
            self._on_removed(environment_id, 0, "it was damaged")
            return False
        manifest = self.store.manifests.get(environment_id)
        if manifest is None:  # removed meanwhile
            return False
        self._accept(manifest)
        took_ms = round((time.monotonic() - started) * 1000)
        _log.info("environment_checked", environment_id=environment_id, took_ms=took_ms)
        return True

    # -- in use ------------------------------------------------------------------------------------------------------

    def _in_use(self, environment_id: str) -> bool:
        """True while a sandbox has it, or may get it: a request was answered with it recently."""
        answered_at = self._answered_at.get(environment_id)
        is_new = answered_at is not None and time.monotonic() - answered_at < _ANSWER_S
        return is_new or environment_id in self._checks or self.holds.count(environment_id) > 0

    def hold(self, environment_id: str, backend: str, sandbox_id: str) -> None:
        """Raises SandboxFailure."""
        if not self._is_ready(environment_id):
            raise SandboxFailure(f"environment {environment_id} is not there any more")
        self.holds.add(environment_id, backend, sandbox_id)

    def used_s(self, environment_id: str) -> float:
        """Returns the time of its last use, in seconds since the epoch."""
        return max(self.index.used_s(environment_id), self.store.manifests[environment_id].created_s)

    # -- removing ----------------------------------------------------------------------------------------------------

    async def collect(self, max_bytes: int, reason: str) -> Collected:
        """Removes unused environments and wheels, the least recently used first, until `max_bytes` are left.

        Also removes damaged environments that no sandbox has. Raises OSError.
        """
        async with self._collecting:
            before = await asyncio.to_thread(self._remove_damaged)
            self.total_bytes = before
            evicted = []
            for _, what in sorted(await self._unused()) if before > max_bytes else ():
                if self.total_bytes <= max_bytes:
                    break
                is_wheel = what.parent == self.store.places.wheels
                freed_bytes = await asyncio.to_thread(_bytes_of, what)
                if self._wheels.is_in_use(what) if is_wheel else self._in_use(what.name):  # since the list was made
                    continue
                # There is no await between the check and the rename, so no request can get it in between.
                removed = self._wheels.take_out(what) if is_wheel else self._take_out(what.name)
                await asyncio.to_thread(remove, removed)
                self.total_bytes -= freed_bytes
                if not is_wheel:
                    evicted.append(Evicted(what.name, freed_bytes))
                    self._on_removed(what.name, freed_bytes, reason)
                    _log.info("environment_evicted", environment_id=what.name, freed_bytes=freed_bytes)
            if self.total_bytes > max_bytes:
                _log.warning("environments_above_limit", total_bytes=self.total_bytes, max_bytes=max_bytes)
            return Collected(tuple(evicted), before - self.total_bytes, self.total_bytes)

    async def _unused(self) -> list[tuple[float, Path]]:
        """Returns the evictable directories, each with its last use. Raises OSError."""
        ready = self.store.places.ready
        unused = [(self.used_s(each), ready / each) for each in self.store.manifests if not self._in_use(each)]
        return unused + await asyncio.to_thread(self._wheels.unused)

    def _remove_damaged(self) -> int:
        """Removes damaged environments that no sandbox has; returns the bytes that are left. Blocks."""
        for environment_id, path in self.store.damaged():
            if not self.holds.count(environment_id):
                remove(path)
        return _bytes_of(self.store.places.root)

    def _take_out(self, environment_id: str) -> Path:
        """Ends an environment; its requests keep their lock. Returns the directory to remove. Raises OSError."""
        self._forget(environment_id)
        return self.store.take_out(environment_id)

    def _forget(self, environment_id: str) -> None:
        self._ready.pop(environment_id, None)
        self._answered_at.pop(environment_id, None)
        self.index.forget_uses(environment_id)


def _bytes_of(directory: Path) -> int:
    return int(volume_of(directory).size_bytes)
