"""Finds an earlier daemon's sandbox through its directory, to be taken over or destroyed like any other.

Its processes are not our children, so their ids may be used again at any time. The race: a process ends between the
comparison with the record and the kill, and another one gets its id. So a pidfd is opened first and the record compared
afterwards: while the pidfd is open it means the same process, and only a process with the recorded start time is kept.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from executor_server.backends.channel import SocketEndpoint
from executor_server.backends.directory import SOCKET_NAME
from executor_server.backends.local.descriptors import is_readable, kill, wait_readable, wait_readable_too
from executor_server.backends.local.records import Record, open_recorded, read_record
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.core import SandboxFailure


def recover(directory: Path, token: bytes, forget: Callable[[LocalSandbox], None]) -> LocalSandbox:
    """Returns the sandbox that this directory describes, dead or alive; see `still_serves`."""
    endpoint = SocketEndpoint(directory / SOCKET_NAME, token)
    record = read_record(directory)
    if record is None:
        return LocalSandbox(directory.name, directory, endpoint, "", forget)
    return LocalSandbox(
        record.sandbox_id,
        directory,
        endpoint,
        record.fingerprint,
        forget,
        host_uid=record.host_uid,
        cgroup=record.cgroup,
        process=OrphanedProcess(record),
    )


def still_serves(sandbox: LocalSandbox) -> bool:
    """True if it lives and its guest has a socket."""
    if sandbox.process is None or sandbox.process.has_ended():
        return False
    try:
        return stat.S_ISSOCK(sandbox.endpoint.socket_path.lstat().st_mode)
    except FileNotFoundError:
        return False


def fork_server_of(sandbox: LocalSandbox) -> str:
    """Returns the id of the fork server that a recovered sandbox lives in; empty without one."""
    return sandbox.process.fork_server_id if isinstance(sandbox.process, OrphanedProcess) else ""


class OrphanedProcess:
    """The first process of a sandbox that a daemon left, and its bubblewrap, if any. Implements `SandboxProcess`."""

    def __init__(self, record: Record) -> None:
        self.init_pid = record.first.pid
        self._monitor_pid = None if record.monitor is None else record.monitor.pid
        self.fork_server_id = record.fork_server
        self._init_pidfd = open_recorded(record.first)
        self._monitor_pidfd = None if record.monitor is None else open_recorded(record.monitor)

    def has_ended(self) -> bool:
        return self._init_pidfd is None or is_readable(self._init_pidfd)

    async def exit_code(self, deadline: float) -> int | None:
        """Waits, and returns None: only a parent learns the exit code."""
        if self._init_pidfd is not None:
            await wait_readable_too(self._init_pidfd, deadline)
        return None

    def last_words(self) -> str:
        return ""

    async def kill_and_reap(self, deadline: float) -> None:
        if self._init_pidfd is not None:
            kill(self._init_pidfd)
            # Readable only when the kernel has killed and reaped every process of the namespace.
            if not await wait_readable(self._init_pidfd, deadline):
                raise SandboxFailure(f"process {self.init_pid} of an earlier daemon's sandbox does not end")
            os.close(self._init_pidfd)
            self._init_pidfd = None
        if self._monitor_pidfd is not None:
            if not await wait_readable(self._monitor_pidfd, deadline):
                kill(self._monitor_pidfd)
                raise SandboxFailure(f"bubblewrap (process {self._monitor_pid}) does not end after its sandbox")
            os.close(self._monitor_pidfd)
            self._monitor_pidfd = None
