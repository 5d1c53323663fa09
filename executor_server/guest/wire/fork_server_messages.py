"""The packets between the daemon and the processes of a fork server, and their limits.

The daemon has a packet socket to the template process. It sends requests there, and receives `INIT`, `READY` and the
exit statuses of processes. For each sandbox it makes a second pair, hands one end over with the request, and then
speaks with the forked process itself: `HERE`, plan, report, `SERVE`, `SERVING`. No agent code ever has either socket.
"""

from __future__ import annotations

from .paths import import_program

PARENT_NAME, INIT_NAME, TEMPLATE_NAME = "fork-server-top", "fork-server", "fork-template"
"""Names of the processes, as `ps` shows them. A sandbox's own processes have the interpreter's name."""

PACKET_BYTES = 32_768
"""Bytes of the largest packet: a plan, with its filter of system calls."""
MAX_PLAN_FDS = 16
"""Descriptors that go with a plan: the listener, standard error, the counter of CPU time, files of control groups."""

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
"""The namespaces in a report, each as /proc/PID/ns names it. All are the sandbox's own."""
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
STATUS_FIELDS = ("Uid", "Gid", "Groups", "NSpid", "Threads", "NoNewPrivs", "Seccomp", *CAPABILITIES)
"""The lines of /proc/PID/status in a report."""

INIT, READY = b"init", b"ready"
"""On the fork server's socket: from its first process, and from its template process when the modules are imported. The
kernel adds the sender's process id, as the daemon numbers it."""
REFUSED = b"refused "
"""Before a reason: the template process does not serve."""

HERE, SERVE, SERVING = b"here", b"serve", b"serving"
"""On a sandbox's socket: the forked process's first packet, the daemon's answer, and the process's last packet."""
FAILED = b"failed "
"""Before a reason: the template process could not fork, or the forked process could not become a sandbox, and ends."""


def fork_server_boot(archive: str, program: str) -> str:
    """Returns the program for `python -c` that starts the launcher or, inside the fork server, its first process."""
    return f"{import_program(repr(archive))}from executor_guest.fork_server.{program} import main; main()"
