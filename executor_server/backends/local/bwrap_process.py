"""One bubblewrap process: starts it, confines the sandbox from outside while it waits, releases, kills and reaps it.

The daemon sets the sandbox's limits and writes its record from outside. Both must be complete before the sandbox runs
anything, so bubblewrap builds the file system and waits (--block-fd) before it executes the command. Its own user:

- As an ordinary user it makes the user namespace, and maps our own user to the sandbox's.
- As root it must not do so: the program would run as the host's user 0, who owns /proc/sys even without any capability.
  It runs in a user namespace that belongs to the sandbox's user (guest/fork_server/owner.py), a host user that no other
  process has. There 0 stays the host's root, just to build the file system (the Python environment may lie in a
  directory that only root can enter). The command starts as 0 with the capabilities to change user
  and no others; the supervisor's first act is to drop to the sandbox's user for good, before it accepts any connection.
  The two capabilities stay in its bounding set, which gives nothing away: no program gains any by being executed.

Bubblewrap itself stays as the parent of the sandbox's first process and ends with it. Killing that first process kills
everything in its process namespace; a sandbox ends in this way, not by a list of processes.

Neither of the two processes needs the daemon after the release: no pipe leads back here, and no signal is sent when the
daemon dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from executor_server.backends.local.cgroups import Cgroup
from executor_server.backends.local.descriptors import is_readable, kill, read_within, wait_readable, wait_readable_too
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.backends.local.stderr_file import open_stderr, read_stderr
from executor_server.core import SandboxFailure
from executor_server.guest.wire.fork_server_messages import fork_server_boot

_INFO_BYTES = 4096


class SandboxProcess(Protocol):
    """The first process of a sandbox, with the bubblewrap that is its parent, started by this daemon or another."""

    @property
    def init_pid(self) -> int | None:
        """The first process as the host numbers it; None before it is known."""
        ...

    def has_ended(self) -> bool:
        """True when the first process does not exist any more."""
        ...

    async def exit_code(self, deadline: float) -> int | None:
        """Waits for the first process to end, and returns its exit code as a shell would (128 and the signal).

        None when that is not known, or it has not ended by the deadline.
        """
        ...

    def last_words(self) -> str:
        """Returns the standard error of bubblewrap and the first process. It names host paths: never for a client."""
        ...

    async def kill_and_reap(self, deadline: float) -> None:
        """Ends the sandbox and waits until all processes are reaped. Idempotent; raises SandboxFailure when late."""
        ...


@dataclass
class BwrapProcess:
    """A bubblewrap that waits for the release and then runs a sandbox; during the wait it names the first process.

    Implements `SandboxProcess`.
    """

    popen: subprocess.Popen[bytes]
    monitor_pidfd: int
    stderr: int  # descriptor of the file that bubblewrap and the first process write to
    _info: int
    _release: int
    init_pid: int | None = None
    init_pidfd: int | None = None
    _reaped: bool = False

    async def confine_and_release(
        self,
        *,
        rlimits: Mapping[int, int],
        on_held: Callable[[int], None],
        deadline: float,
    ) -> None:
        """Learns the first process's id, confines the process and releases it.

        `on_held` gets the first process's id. Raises SandboxFailure; the caller then kills it.
        """
        pid = self.init_pid = await self._first_process(deadline)
        try:
            self.init_pidfd = os.pidfd_open(pid)  # the id is not used again before its parent, which waits, reaps it
            for limit, value in rlimits.items():
                resource.prlimit(pid, limit, (value, value))
            on_held(pid)
            os.write(self._release, b"1")
        except OSError as error:
            raise SandboxFailure(f"cannot confine a sandbox: {error}; {self.last_words()}") from error
        self._close_wait()

    def has_ended(self) -> bool:
        return self._reaped or (self.init_pidfd is not None and is_readable(self.init_pidfd))

    async def exit_code(self, deadline: float) -> int | None:
        if not self._reaped:
            await wait_readable_too(self.monitor_pidfd, deadline)
        code = self.popen.poll()
        return code if code is not None and code >= 0 else None  # below 0 bubblewrap itself was killed

    async def kill_and_reap(self, deadline: float) -> None:
        if self._reaped:
            return
        if self.init_pidfd is not None:
            kill(self.init_pidfd)
            # Readable only when the kernel has killed and reaped every process of the namespace.
            if not await wait_readable(self.init_pidfd, deadline):
                raise SandboxFailure(f"process {self.init_pid} of a sandbox does not end")
            if self._release >= 0:  # not released: bubblewrap waits for us, and would not see its child's end
                kill(self.monitor_pidfd)
        else:
            # Before --new-session it is one process group; the child alone would wait for its parent for ever.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
        if not await wait_readable(self.monitor_pidfd, deadline):
            kill(self.monitor_pidfd)
            raise SandboxFailure(f"bubblewrap (process {self.popen.pid}) does not end after its sandbox")
        self.popen.wait()
        self._reaped = True
        self._close_wait()
        for fd in (self.monitor_pidfd, self.stderr, self.init_pidfd):
            if fd is not None:
                os.close(fd)

    def last_words(self) -> str:
        return "" if self._reaped else read_stderr(self.stderr)

    async def _first_process(self, deadline: float) -> int:
        info = b""
        while b"}" not in info and len(info) < _INFO_BYTES:
            piece = await read_within(self._info, _INFO_BYTES, deadline)
            if piece is None:
                raise SandboxFailure("bubblewrap does not answer")
            if not piece:
                break
            info += piece
        try:
            return int(json.loads(info)["child-pid"])
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxFailure(f"bubblewrap failed: {self.last_words()}") from error

    def _close_wait(self) -> None:
        """Closes the pipes, only after the release or bubblewrap's end: it takes a closed pipe for a release."""
        for fd in (self._info, self._release):
            if fd >= 0:
                os.close(fd)
        self._info = self._release = -1


def start_bwrap(
    bwrap: Path,
    arguments: Iterable[str],
    command: Sequence[str],
    *,
    guest: Path,
    host_uid: int | None,
    seccomp: bytes,
    cgroup: Cgroup | None,
    pass_fds: Sequence[int] = (),
    stdout: int = subprocess.DEVNULL,
) -> BwrapProcess:
    """Starts bubblewrap, which then waits. The caller confines and releases it, or kills it.

    `host_uid` is the user that the sandbox gets on the host, None for our own.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        info_read, info_write = _pipe(ours, theirs)
        block_read, block_write = _pipe(theirs, ours)
        stderr = open_stderr()
        ours.callback(os.close, stderr)
        filter_fd = _memory_file("seccomp", seccomp)
        theirs.callback(os.close, filter_fd)
        held = ["--block-fd", str(block_read), "--info-fd", str(info_write), "--seccomp", str(filter_fd)]
        if host_uid is None:
            before = []
            held += ["--unshare-user", "--uid", str(SANDBOX_ID), "--gid", str(SANDBOX_ID)]
        else:
            boot = fork_server_boot(str(guest), "owner")
            before = [sys.executable, "-I", "-S", "-c", boot, str(host_uid), str(SANDBOX_ID)]
            held += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command_line = [*before, str(bwrap), *held, *arguments, "--", *command]
        popen = subprocess.Popen(
            cgroup.enter_and_run(command_line) if cgroup else command_line,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env={},
            pass_fds=(block_read, info_write, filter_fd, *pass_fds),
            start_new_session=True,  # a Ctrl-C in the daemon's terminal is for the daemon
        )
        ours.callback(_abandon, popen)
        process = BwrapProcess(popen, os.pidfd_open(popen.pid), stderr, info_read, block_write)
        ours.pop_all()
    return process


def _abandon(popen: subprocess.Popen[bytes]) -> None:
    os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    reader.callback(os.close, read)
    writer.callback(os.close, write)
    return read, write


def _memory_file(name: str, data: bytes) -> int:
    fd = os.memfd_create(name)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
