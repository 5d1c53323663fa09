"""One fork server: starts its processes, asks its template process for forks, learns how those ended, and drops it.

A fork server is made once and not changed. It serves until it is retired, because it has made its share of sandboxes,
is not used any more, or does not answer. A retired one gets no more requests; its template process ends, and its first
process ends after the last sandbox. The race on retiring: a request may lie in the socket. If the template process
still reads it, it forks a process whose own socket is closed at the other end, and which ends at its first message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from executor_server.backends.local.descriptors import is_readable, kill, wait_readable
from executor_server.backends.local.fork_server.packets import now, packet_pair, receive_now, send_with
from executor_server.backends.local.layout import Entry
from executor_server.backends.local.records import ProcessRecord
from executor_server.backends.local.stderr_file import open_stderr, read_stderr
from executor_server.core import SandboxFailure
from executor_server.guest.wire.fork_server_messages import INIT, READY, REFUSED, fork_server_boot

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Blueprint:
    """Everything that a fork server is made of; sandboxes of equal blueprints can share one."""

    guest: Path  # the archive, whose name has its version
    image_identity: str
    root: tuple[Entry, ...]
    python: Path
    environment: tuple[tuple[str, str], ...]
    modules: tuple[str, ...]
    # The first host user of fork servers, the first of sandboxes, the number of the latter; None: the daemon's.
    users: tuple[int, int, int] | None
    owner: str = ""  # the tenant, where each has its own


@dataclass
class ForkServer:
    """Owns the processes until `end`."""

    blueprint: Blueprint
    fork_server_id: str
    popen: subprocess.Popen[bytes]
    monitor_pidfd: int
    _socket: socket.socket
    _lifeline: int
    _stderr: int
    _on_init: Callable[[ForkServer, ProcessRecord], None]
    started_at: float
    imported: tuple[str, ...] = ()
    namespaces: dict[str, int] = field(default_factory=dict)
    init_pidfd: int | None = None
    init_pid: int | None = None
    template_pid: int | None = None
    requests: int = 0
    is_ready: bool = False
    ended_because: str = ""  # not empty: retired, or it could not be made
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    _exits: dict[int, asyncio.Future[int]] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        return self.is_ready and not self.ended_because

    # -- requests

    def request(self, control: socket.socket) -> asyncio.Future[int]:
        """Asks for a fork that gets this socket; returns the future wait status. Raises OSError."""
        self.requests += 1
        send_with(self._socket, b"%d" % self.requests, [control.fileno()])
        ended = asyncio.get_running_loop().create_future()
        self._exits[self.requests] = ended
        return ended

    # -- packets of its processes

    def _on_packets(self) -> None:
        while True:
            try:
                packet = receive_now(self._socket)
            except BlockingIOError:
                return
            except OSError as error:
                self.retire(f"its socket failed: {error}")
                return
            if not packet.data:
                self.retire("its template process ended")
                return
            try:
                self._on_packet(packet.data, packet.pid)
            except (ValueError, KeyError, TypeError, OSError) as error:
                self.retire(f"it sent what makes no sense: {type(error).__name__}")
                return

    def _on_packet(self, data: bytes, pid: int) -> None:
        if data == INIT and self.init_pidfd is None:
            # The id can't have been used again: the launcher, its parent, is alive, or has left it to the host's first
            # process.
            self.init_pid, self.init_pidfd = pid, os.pidfd_open(pid)
            self._on_init(self, ProcessRecord.of(pid))
        elif data.startswith(READY) and not self.is_ready:
            said = json.loads(data[len(READY) :])
            self.imported = tuple(str(name) for name in said["modules"])
            self.namespaces = {str(name): int(inode) for name, inode in said["namespaces"].items()}
            self.template_pid, self.is_ready = pid, True
            self.settled.set()
            took_s = round(now() - self.started_at, 3)
            _log.debug("template_process_ready", fork_server=self.fork_server_id, took_s=took_s)
        elif data.startswith(REFUSED):
            self.retire(data[len(REFUSED) :].decode("utf-8", "backslashreplace"))
        else:
            number, _, status = data.partition(b" ")
            ended = self._exits.pop(int(number), None)
            if ended is not None and not ended.done():
                ended.set_result(int(status))

    # -- its end

    def retire(self, reason: str) -> None:
        """Sends it no more requests. Its sandboxes live on; it ends with the last of them. Idempotent."""
        if self.ended_because:
            return
        self.ended_because = reason
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        os.close(self._lifeline)
        for ended in self._exits.values():
            if not ended.done():
                ended.cancel()
        self._exits.clear()
        self.settled.set()
        words = self.last_words()
        _log.debug("fork_server_retired", fork_server=self.fork_server_id, reason=reason, requests=self.requests)
        if words:
            _log.debug("fork_server_last_words", fork_server=self.fork_server_id, text=words)

    def has_ended(self) -> bool:
        """True when none of its processes is left."""
        init_ended = self.init_pidfd is None or is_readable(self.init_pidfd)
        return is_readable(self.monitor_pidfd) and init_ended

    def last_words(self) -> str:
        """Returns what its processes wrote to standard error. It names host paths: never for a client."""
        return read_stderr(self._stderr)

    async def end(self, deadline: float) -> None:
        """Ends it with all sandboxes that it still has. Raises SandboxFailure when it does not end in time.

        Until its first process has reported itself, the daemon could kill only the parent, and would not know when the
        child ends. So it kills neither: the child ends at its report, since the socket is closed, and then the parent.
        """
        self.retire("the daemon ends it")
        if self.init_pidfd is not None:
            kill(self.init_pidfd)
            if not await wait_readable(self.init_pidfd, deadline):
                raise SandboxFailure(f"process {self.init_pid} of a fork server does not end")
        if not await wait_readable(self.monitor_pidfd, deadline):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            raise SandboxFailure(f"the parent of a fork server (process {self.popen.pid}) does not end")
        self.release()

    def release(self) -> None:
        """Releases what the daemon holds of an ended fork server."""
        self.popen.wait()
        for fd in (self.monitor_pidfd, self.init_pidfd, self._stderr):
            if fd is not None:
                os.close(fd)
        self.init_pidfd = None


def start_fork_server(
    blueprint: Blueprint, fork_server_id: str, on_init: Callable[[ForkServer, ProcessRecord], None]
) -> ForkServer:
    """Starts one, which then gets ready by itself. Raises OSError."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        requests, remote = packet_pair()
        ours.callback(requests.close)
        theirs.callback(remote.close)
        lifeline_read, lifeline = os.pipe()
        theirs.callback(os.close, lifeline_read)
        ours.callback(os.close, lifeline)
        stderr = open_stderr()
        ours.callback(os.close, stderr)
        users = blueprint.users
        config = {
            # Each fork server has a user of its own: for some resources, the kernel counts all its sandboxes under that
            # user.
            "users": users and (users[0] + secrets.randbelow(users[1] - users[0]), *users[1:]),
            "root": blueprint.root,
            "python": str(blueprint.python),
            "environment": dict(blueprint.environment),
            "modules": blueprint.modules,
            "fds": [remote.fileno(), lifeline_read],
        }
        program = fork_server_boot(str(blueprint.guest), "launch")
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, json.dumps(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={"LANG": "C.UTF-8"},
            cwd="/",
            pass_fds=(remote.fileno(), lifeline_read),
            start_new_session=True,  # a Ctrl-C in the daemon's terminal is for the daemon
        )
        ours.callback(_abandon, popen)
        fork_server = ForkServer(
            blueprint, fork_server_id, popen, os.pidfd_open(popen.pid), requests, lifeline, stderr, on_init, now()
        )
        asyncio.get_running_loop().add_reader(requests.fileno(), fork_server._on_packets)
        ours.pop_all()
    return fork_server


def _abandon(popen: subprocess.Popen[bytes]) -> None:
    os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()
