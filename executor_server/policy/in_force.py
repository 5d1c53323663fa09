"""The policy in force: read from its file, and replaced when the file's content means another policy.

An unusable file changes nothing and is reported as an error, once for each content. The file is read again as soon as
its content, inode or link changes, and so are the lock files that it names.

Half of a policy file can be a valid policy with fewer tenants. So a file is used only after it has not changed for
`SETTLE_S`. Writing a new file next to it and renaming that is safe on any disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from executor_server.core.config import ConfigError, read_trusted
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile, built_in_policy, parse_policy
from executor_server.policy.lock_file import lock_files_read

WATCH_INTERVAL_S = 0.5
"""Seconds between checks of the policy file for changes."""
SETTLE_S = 0.1
"""Seconds without a change after which a file counts as complete."""

# Attempts to read a changing file before it is refused.
_MAX_READINGS = 20

_log = structlog.get_logger(__name__)

# Device, inode, size, times of the content and of the inode; None: there is no file.
_Signature = tuple[int, ...] | None
_READ_AGAIN: tuple[_Signature, ...] = ()  # equals no signatures of files, since there is at least one file


class PolicyListener:
    """Notified, in the event loop, of each requested reading and of each reading with news."""

    def policy_changed(self, before: Policy, now: Policy) -> None:
        """Another policy is in force. Must not raise."""

    def policy_unchanged(self) -> None:
        """A requested reading found the same policy."""

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        """The file can't be used; `current` stays in force."""


class PolicyStore:
    """Owns the policy in force, and the task that watches its file, if it has one."""

    def __init__(
        self,
        path: Path | None,
        make: Callable[[PolicyFile], Policy],
        interval_s: float,
        listener: PolicyListener | None = None,
        copies: Path | None = None,
    ) -> None:
        """Reads the file, and `copies` of its lock files if the policy came from a fleet's front. Raises ConfigError.

        `make` raises ConfigError for a valid policy that can't be served here; any thread may call it.
        """
        self._path = path
        self._copies = copies
        self._make = make
        self._interval_s = interval_s
        self._listener = listener or PolicyListener()
        self._seen = _READ_AGAIN if path is None else (_signature(path),)
        self._locks: Sequence[Path] = ()  # that the policy file named when it was read last, also if it was refused
        self._are_locks_read = True
        self._reported = ""  # digest of the content and the problems that were last reported
        self._reading = asyncio.Lock()
        self._asked = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self.content = b"" if path is None else read_trusted(path, "policy file")
        """The content of the file that the policy in force was read from; empty for the built-in policy."""
        self.current = make(built_in_policy()) if path is None else self._policy_of(self.content, path)
        self.before: Policy | None = None  # the policy that was in force before; None: there was none
        self.load_time_s = time.time()  # Unix time at which the policy in force was read

    @property
    def path(self) -> Path | None:
        """The file; None for the built-in policy."""
        return self._path

    async def start(self) -> None:
        """Begins to watch the file."""
        if self._path is not None:
            self._watcher = asyncio.create_task(self._watch_forever(self._path))

    async def close(self) -> None:
        """Ends watching. Idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def reload(self) -> bool:
        """Reads the file now; returns True if the policy changed. Raises ConfigError, and changes nothing then."""
        if self._path is None:
            self._listener.policy_unchanged()
            return False
        return await self._read(self._path, asked=True)

    def reload_soon(self) -> None:
        """Lets the watcher reload, for a signal; the result goes to the log and the listener only."""
        self._asked.set()

    # -- watching ------------------------------------------------------------------------------------------------

    async def _watch_forever(self, path: Path) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            asked = self._asked.is_set()
            self._asked.clear()
            if not asked and self._signatures(path) == self._seen:
                continue
            try:
                await self._read(path, asked=asked)
            except ConfigError:
                continue  # _read has reported it
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end watching for good
                _log.exception("policy_watch_broke")

    async def _read(self, path: Path, *, asked: bool) -> bool:
        """Raises ConfigError."""
        async with self._reading:
            found = b""
            try:
                found = await self._read_settled(path)
                policy = await asyncio.to_thread(self._policy_of, found, path)
            except ConfigError as error:
                if not (found and self._are_locks_read):  # a file could not be read, which may be temporary
                    self._seen = _READ_AGAIN
                self._report(hashlib.sha256(found + repr(error.problems).encode()).hexdigest(), error, asked=asked)
                raise
            except asyncio.CancelledError:
                self._seen = _READ_AGAIN  # the caller is gone in the middle of a reading: the watcher has to finish it
                raise
            self._reported = ""
            return self._take(policy, found, asked=asked)

    async def _read_settled(self, path: Path) -> bytes:
        """Returns the content of a file that has not changed for SETTLE_S, nor have its locks. Raises ConfigError."""
        for _ in range(_MAX_READINGS):
            before = self._seen = self._signatures(path)
            data = await asyncio.to_thread(read_trusted, path, "policy file")
            await asyncio.sleep(SETTLE_S)
            if self._signatures(path) == before:
                return data
        raise ConfigError([f"The policy file {path} keeps changing; write it once, or replace it."])

    def _signatures(self, path: Path) -> tuple[_Signature, ...]:
        """The signatures of the policy file and of the locks that it named when it was read last."""
        return _signature(path), *map(_signature, self._locks)

    def _policy_of(self, content: bytes, path: Path) -> Policy:
        """Raises ConfigError."""
        with lock_files_read() as locks:
            try:
                return self._make(parse_policy(content, path, self._copies))
            finally:
                self._locks = sorted(locks)
                self._are_locks_read = all(locks.values())

    def _take(self, policy: Policy, content: bytes, *, asked: bool) -> bool:
        before = self.current
        if policy.fingerprint == before.fingerprint:
            if asked:
                self._listener.policy_unchanged()
            return False
        self.before, self.current, self.content, self.load_time_s = before, policy, content, time.time()
        _log.warning(
            "policy_changed", version=policy.version, fingerprint=policy.fingerprint, before=before.fingerprint
        )
        self._listener.policy_changed(before, policy)
        return True

    def _report(self, found: str, error: ConfigError, *, asked: bool) -> None:
        if found == self._reported and not asked:
            return
        self._reported = found
        _log.error("policy_refused", path=str(self._path), in_force=self.current.fingerprint, problems=error.problems)
        self._listener.policy_refused(self.current, error.problems)


def _signature(path: Path) -> _Signature:
    try:
        found = os.stat(path)  # noqa: PTH116 - like os.open and os.fstat of the same file
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
