"""Makes one sandbox by forking a fork server's template process, until the sandbox's guest serves.

The order, and the race that each step closes:

1. The template process gets one end of a new socket, and nothing else. The other end is ours alone, so only the
   fork can answer. If it never comes, closing our end is enough: a fork that comes late reads the end and exits.
2. `HERE` carries the process id from the kernel, and a handle (pidfd) is opened. The id may belong to another process
   if the fork has ended meanwhile, but only a child of the template process gets a handle: nothing else is ever killed
   here. A later packet with the same id, which only the living fork can send, then confirms it.
3. Only then the plan goes to the fork. Sent earlier it would lie in the socket for a fork that comes late: a listener
   and a configuration, without a daemon that watches.
4. The record is written while the fork builds its walls, and before it serves: so a later daemon finds each sandbox
   that ever ran anything.
5. The report and the kernel's information about the process are checked (verification.py), and `SERVE` is sent. A fork
   that fails the check is killed here, having run nothing.
6. `SERVING` comes when its supervisor exists, before the supervisor runs anything. A fork that ends earlier costs
   its session nothing: bubblewrap makes the sandbox.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from executor_server.backends.local.fork_server.fork_server import ForkServer
from executor_server.backends.local.fork_server.forked_process import ForkedProcess, ForkFailed, ask_fork, next_packet
from executor_server.backends.local.fork_server.packets import now, send_with
from executor_server.backends.local.fork_server.verification import fault_of, fault_of_process
from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.guest.wire.fork_server_messages import MAX_PLAN_FDS, PACKET_BYTES, SERVE, SERVING

# Seconds for a killed fork to end.
_END_TIME_S = 5.0


@dataclass(frozen=True)
class SandboxPlan:
    """One sandbox, for the process that becomes it."""

    guest: Mapping[str, object]  # the guest's configuration (guest/main.py), without descriptors
    sizes: Mapping[str, int]  # bytes of `disk` and `shm`; `files` in each file system
    rlimits: Mapping[int, int]
    host_uid: int | None
    seccomp: bytes
    environment: Mapping[str, str]
    below_tmp: Sequence[str]  # directories of the image there, to be seen in the sandbox's own /tmp
    listener: int  # descriptors of the daemon
    cpu_counter: int | None
    groups: Sequence[int]  # files with which it joins its control groups

    def packed(self, stderr: int) -> tuple[bytes, list[int]]:
        """Returns the packet, and the descriptors that go with it."""
        named = {"stderr": stderr, "listen": self.listener}
        if self.cpu_counter is not None:
            named["cpu"] = self.cpu_counter
        plan = {
            "fds": list(named),
            "guest": dict(self.guest),
            "sizes": dict(self.sizes),
            "rlimits": list(self.rlimits.items()),
            "host_uid": self.host_uid,
            "uid": SANDBOX_ID,
            "seccomp": base64.b64encode(self.seccomp).decode(),
            "environment": dict(self.environment),
            "below_tmp": list(self.below_tmp),
        }
        packet, fds = json.dumps(plan).encode(), [*named.values(), *self.groups]
        if len(packet) > PACKET_BYTES or len(fds) > MAX_PLAN_FDS:
            raise ForkFailed("unsupported", f"a plan of {len(packet)} bytes and {len(fds)} descriptors")
        return packet, fds

    @property
    def kept_descriptors(self) -> int:
        """Descriptors that the process has when it reports: streams, its socket, the listener, the counter."""
        return 5 + (self.cpu_counter is not None)


async def fork(
    fork_server: ForkServer, plan: SandboxPlan, on_here: Callable[[int, ForkedProcess], None]
) -> ForkedProcess:
    """Makes a sandbox. `on_here` gets its first process, before that runs anything of the sandbox.

    Raises ForkFailed, and what `on_here` raises; nothing of the sandbox is left then.
    """
    process, ours = await ask_fork(fork_server)
    pid = process.init_pid
    try:
        try:
            send_with(ours, *plan.packed(process.stderr))
        except OSError as error:
            raise ForkFailed("failed", f"the fork can't be sent its plan: {error}") from error
        on_here(pid, process)
        report = await _report(ours, pid)
        fault = fault_of(report, plan, fork_server.namespaces) or fault_of_process(
            pid, report, plan, fork_server.namespaces
        )
        if fault:
            raise ForkFailed("unverified", f"the sandbox is not as it must be: {fault}")
        try:
            ours.send(SERVE)
        except OSError as error:
            raise ForkFailed("failed", f"the fork has ended: {error}") from error
        await _serving(ours, pid)
    except BaseException:
        await asyncio.shield(process.kill_and_reap(now() + _END_TIME_S))
        raise
    finally:
        ours.close()
    return process


async def _report(ours: socket.socket, pid: int) -> dict[str, object]:
    data = await _said(ours, pid)
    try:
        report = json.loads(data)
    except ValueError as error:
        raise ForkFailed("failed", f"the fork says {data[:80]!r}") from error
    if not isinstance(report, dict):
        raise ForkFailed("failed", f"the fork says {data[:80]!r}")
    return report


async def _serving(ours: socket.socket, pid: int) -> None:
    data = await _said(ours, pid)
    if data != SERVING:
        raise ForkFailed("failed", f"the fork says {data[:80]!r}")


async def _said(ours: socket.socket, pid: int) -> bytes:
    data, sender = await next_packet(ours)
    if sender != pid:
        raise ForkFailed("failed", "another process than the fork answers")
    return data
