"""The policy in force: read from its file, and replaced when the file comes to say something else.

A file that can't be used changes nothing, and is complained of loudly, once for each thing that it says. It is looked
at again as soon as it changes: another content, another file under its name, another link to it.

The beginning of a policy can be a policy as well, and one that knows fewer tenants. So what is in the file is taken
only when it stands still for `SETTLE_S`; who writes it beside and renames it is on the safe side however slow the disk
is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from executor_server.policy import Policy
from executor_server.policy_file import PolicyFile, load_policy, parse_policy
from executor_server.settings import ConfigError, read_trusted

SETTLE_S = 0.1
# For a file that never stands still.
_MAX_LOOKS = 20

_log = structlog.get_logger(__name__)

# Device, inode, size, times of the content and of the inode; None: there is nothing to be looked at.
_Signature = tuple[int, ...] | None
_LOOK_AGAIN: _Signature = ()  # which nothing looks like


class PolicyListener:
    """Told of each reading that was asked for, and of those that found something new. In the event loop."""

    def policy_changed(self, before: Policy, now: Policy) -> None:
        """Another policy is in force. Must not raise."""

    def policy_unchanged(self) -> None:
        """It was asked for, and says what it said before."""

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        """The file can't be used, and this policy stays in force."""


class PolicyStore:
    """Owns the policy in force, and the task that watches its file. Without a file there is nothing to watch."""

    def __init__(
        self,
        path: Path | None,
        make: Callable[[PolicyFile], Policy],
        interval_s: float,
        listener: PolicyListener | None = None,
    ) -> None:
        """Reads it. `make` raises ConfigError for what is valid and can't be served here; other threads call it, too.

        Raises ConfigError.
        """
        self._path = path
        self._make = make
        self._interval_s = interval_s
        self._listener = listener or PolicyListener()
        self._seen = _signature(path) if path is not None else None
        self._complained_of = ""  # what was found when it could not be used, as a hash
        self._turn = asyncio.Lock()  # of readings
        self._asked = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self.current = make(load_policy(path))

    async def start(self) -> None:
        """Begins to watch."""
        if self._path is not None:
            self._watcher = asyncio.create_task(self._watch_forever(self._path))

    async def close(self) -> None:
        """Ends watching. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def reload(self) -> bool:
        """Reads the file now; whether another policy is in force since. Raises ConfigError, and has changed nothing."""
        if self._path is None:
            self._listener.policy_unchanged()
            return False
        return await self._read(self._path, asked=True)

    def reload_soon(self) -> None:
        """As `reload`, by the watcher, which tells the log and the listener alone. For a signal."""
        self._asked.set()

    # -- watching ------------------------------------------------------------------------------------------------

    async def _watch_forever(self, path: Path) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            if not asked and _signature(path) == self._seen:
                continue
            try:
                await self._read(path, asked=asked)
            except ConfigError:
                continue  # it has been said
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end watching for good
                _log.exception("policy_watch_broke")

    async def _read(self, path: Path, *, asked: bool) -> bool:
        """Raises ConfigError."""
        async with self._turn:
            found = b""
            try:
                found = await self._read_settled(path)
                policy = await asyncio.to_thread(lambda: self._make(parse_policy(found, path)))
            except ConfigError as error:
                if not found:  # it may be the system that had no time for it
                    self._seen = _LOOK_AGAIN
                self._complain(hashlib.sha256(found + repr(error.problems).encode()).hexdigest(), error, asked=asked)
                raise
            except asyncio.CancelledError:
                self._seen = None  # who asked for it has gone in the middle: the watcher has to look for itself
                raise
            self._complained_of = ""
            return self._take(policy, asked=asked)

    async def _read_settled(self, path: Path) -> bytes:
        """What is in the file, which does not change meanwhile. Raises ConfigError."""
        for _ in range(_MAX_LOOKS):
            before = self._seen = _signature(path)
            data = await asyncio.to_thread(read_trusted, path, "policy file")
            await asyncio.sleep(SETTLE_S)
            if _signature(path) == before:
                return data
        raise ConfigError([f"The policy file {path} is being written all the time."])

    def _take(self, policy: Policy, *, asked: bool) -> bool:
        before = self.current
        if policy.fingerprint == before.fingerprint:
            if asked:
                self._listener.policy_unchanged()
            return False
        self.current = policy
        _log.warning(
            "policy_changed", version=policy.version, fingerprint=policy.fingerprint, before=before.fingerprint
        )
        self._listener.policy_changed(before, policy)
        return True

    def _complain(self, found: str, error: ConfigError, *, asked: bool) -> None:
        if found == self._complained_of and not asked:
            return
        self._complained_of = found
        _log.error("policy_refused", path=str(self._path), in_force=self.current.fingerprint, problems=error.problems)
        self._listener.policy_refused(self.current, error.problems)


def _signature(path: Path) -> _Signature:
    try:
        found = os.stat(path)  # noqa: PTH116 - beside os.open and os.fstat of the same file
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
