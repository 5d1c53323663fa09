"""The environments that there are, with all that is known of them: their requests, their users, their last uses.

An environment counts as ready when this daemon made it or has checked every byte of it. From then on a request for it
costs a look into a few dictionaries, and one `stat` since a person may have removed the directory.

Belongs to the event loop, except where a method says that it blocks.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

from executor_server.backends import Environment
from executor_server.core import SandboxFailure
from executor_server.environments.disk_use import archives_of
from executor_server.environments.file_list import Stopped, TreeError, Walk
from executor_server.environments.holds import Holds
from executor_server.environments.index import Index, Request
from executor_server.environments.manifest import Manifest
from executor_server.environments.places import Places
from executor_server.environments.requester import current_requester
from executor_server.environments.store import Store, remove

# Seconds after an answer in which its sandbox is made: only then does it hold the environment itself.
_ANSWER_S = 120.0
# Seconds after which another use of an environment is written down.
_USE_INTERVAL_S = 60.0
_CONCURRENT_CHECKS = 2  # each reads as fast as the disk can
_FULL_BELOW_BYTES = 4 * 2**20

_log = structlog.get_logger(__name__)


OnRemoved = Callable[[str, int, str], None]
"""Called with an environment's id, the bytes that its removal freed, and the reason."""


class Catalog:
    """Owns store, index and holds."""

    def __init__(self, store: Store, on_removed: OnRemoved, now: Callable[[], float]) -> None:
        """Takes an open store, which is closed in every case. `now` gives seconds since the epoch.

        Raises OSError, sqlite3.Error.
        """
        self.now = now
        self._on_removed = on_removed
        self.store = store
        try:
            self.holds = Holds(self.places.holds)
            self.index = Index(self.places.index)
        except BaseException:
            self.store.close()
            raise
        self._ready: dict[str, Environment] = {}
        self._answered_at: dict[str, float] = {}
        self._checks: dict[str, asyncio.Task[bool]] = {}
        self._walks: dict[str, Walk] = {}
        self._checking = asyncio.Semaphore(_CONCURRENT_CHECKS)

    @classmethod
    async def open(cls, root: Path, on_removed: OnRemoved, now: Callable[[], float]) -> Catalog:
        """Opens the directory, or makes it. Raises OSError, sqlite3.Error, SandboxFailure."""
        store = Store(Places(root))
        await asyncio.to_thread(store.open)
        return cls(store, on_removed, now)

    def close(self) -> None:
        self.index.close()
        self.store.close()

    @property
    def places(self) -> Places:
        return self.store.places

    def is_disk_full(self) -> bool:
        try:
            return shutil.disk_usage(self.places.root).free < _FULL_BELOW_BYTES
        except OSError:
            return False

    # -- answering ---------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> Environment | None:
        """Returns the environment of a request when it is ready, and keeps it from being evicted for a while."""
        answer = self.index.find(request)
        environment = None if answer is None else self._ready.get(answer.environment_id)
        if environment is None:
            return None
        if not environment.directory.is_dir():
            _log.error("environment_missing", environment_id=environment.environment_id)
            self.take_out(environment.environment_id)
            return None
        self._answered_at[environment.environment_id] = time.monotonic()
        self._note_use(environment.environment_id)
        return environment

    def _note_use(self, environment_id: str) -> None:
        now, requester = self.now(), current_requester()
        if now - self.index.used_s_by(environment_id, requester) >= _USE_INTERVAL_S:
            self.index.note_use(environment_id, requester, now)

    def accept(self, manifest: Manifest) -> None:
        """Counts an environment as ready: it was just made, or checked."""
        self._ready[manifest.environment_id] = Environment(
            environment_id=manifest.environment_id,
            directory=self.store.tree_of(manifest.environment_id),
            size_bytes=manifest.size_bytes,
            modules=manifest.modules,
            pins=manifest.pins,
        )

    def is_ready(self, environment_id: str) -> bool:
        return environment_id in self._ready and self.store.is_there(environment_id)

    async def check(self, environment_id: str) -> bool:
        """Returns True when the environment is ready: this daemon has checked it, or does so now.

        One that does not fit its manifest is removed, or put aside while sandboxes have it mounted. Raises OSError.
        """
        if self.is_ready(environment_id):
            return True
        if not self.store.is_there(environment_id):
            return False
        check = self._checks.get(environment_id)
        if check is None:
            walk = self._walks[environment_id] = Walk()
            check = self._checks[environment_id] = asyncio.create_task(self._check(environment_id, walk))
            check.add_done_callback(lambda _: self._forget_check(environment_id))
        return await asyncio.shield(check)

    def walk_of(self, environment_id: str) -> Walk | None:
        """Returns how far the check of an environment is; None when none is under way."""
        return self._walks.get(environment_id)

    def _forget_check(self, environment_id: str) -> None:
        del self._checks[environment_id], self._walks[environment_id]

    async def _check(self, environment_id: str, walk: Walk) -> bool:
        started = time.monotonic()
        try:
            async with self._checking:
                await asyncio.to_thread(self.store.check, environment_id, walk)
        except Stopped:
            return False
        except TreeError as error:
            in_use = self.holds.count(environment_id)
            _log.error("environment_damaged", environment_id=environment_id, error=str(error), in_use_by=in_use)
            await self._remove_damaged(environment_id)
            return False
        manifest = self.store.manifests.get(environment_id)
        if manifest is None:  # removed meanwhile
            return False
        self.accept(manifest)
        took_ms = round((time.monotonic() - started) * 1000)
        _log.info("environment_checked", environment_id=environment_id, entries=walk.done, took_ms=took_ms)
        return True

    async def _remove_damaged(self, environment_id: str) -> None:
        """Removes an environment and those archives of the cache that share files with it: the damage may be there."""
        if self.holds.count(environment_id):
            self._ready.pop(environment_id, None)
            removed = self.store.put_aside(environment_id)
        else:
            removed = self.take_out(environment_id)
        for archive in await asyncio.to_thread(archives_of, self.places, removed):
            await asyncio.to_thread(self.store.discard, archive)
        if not self.holds.count(environment_id):
            await asyncio.to_thread(remove, removed)
        self._on_removed(environment_id, 0, "it was damaged")

    async def stop_checks(self) -> None:
        """Ends what is being checked, at the next file."""
        for walk in self._walks.values():
            walk.is_stopped = True
        await asyncio.gather(*self._checks.values(), return_exceptions=True)

    # -- in use ------------------------------------------------------------------------------------------------------

    def in_use(self, environment_id: str) -> bool:
        """True while a sandbox has it, or is about to: a request was answered with it moments ago."""
        answered_at = self._answered_at.get(environment_id)
        is_new = answered_at is not None and time.monotonic() - answered_at < _ANSWER_S
        return is_new or environment_id in self._checks or self.holds.count(environment_id) > 0

    def hold(self, environment_id: str, backend: str, sandbox_id: str) -> None:
        """Raises SandboxFailure."""
        if not self.is_ready(environment_id):
            raise SandboxFailure(f"environment {environment_id} is not there any more")
        self.holds.add(environment_id, backend, sandbox_id)

    def release(self, sandbox_id: str) -> list[str]:
        """Returns the environments that the sandbox had."""
        return self.holds.release(sandbox_id)

    def keep_only(self, backend: str, sandbox_ids: Collection[str]) -> list[str]:
        """Returns the environments that the others had."""
        return self.holds.keep_only(backend, sandbox_ids)

    def unused(self) -> list[str]:
        """Returns the environments that may be evicted, the least recently used first."""
        candidates = [name for name in self.store.manifests if not self.in_use(name)]
        return sorted(candidates, key=self.used_s)

    def used_s(self, environment_id: str) -> float:
        """Returns when it was used last, in seconds since the epoch."""
        return max(self.index.used_s(environment_id), self.store.manifests[environment_id].created_s)

    # -- removing ----------------------------------------------------------------------------------------------------

    def take_out(self, environment_id: str) -> Path:
        """Ends an environment, whose requests keep their lock. Returns what is to be removed. Raises OSError."""
        self._ready.pop(environment_id, None)
        self._answered_at.pop(environment_id, None)
        self.index.forget_uses(environment_id)
        return self.store.take_out(environment_id)

    def forsaken(self) -> list[Path]:
        """Returns damaged environments that no sandbox has any more. Raises OSError."""
        return [path for environment_id, path in self.store.damaged() if not self.holds.count(environment_id)]
