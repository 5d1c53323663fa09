"""Drops the privileges that the proxy's process does not need, before it reads its first byte from a sandbox."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass

from executor_server.guest.wire import privileges

# Sockets: two for each connection; 500 sessions may have 32 connections each, but hardly ever do.
OPEN_FILES = 65_536
# For leaf certificates, which are briefly in memory files. The process writes no other files.
_FILE_BYTES = 65_536
# Threads that resolve names, and those of the loop. The process executes no programs.
_THREADS = 128


@dataclass(frozen=True)
class Confinement:
    """The daemon's decisions: a user that no other process has, if it is root; and the system call filter."""

    uid: int | None
    seccomp: bytes | None


def confine(confinement: Confinement) -> None:
    """Gives up everything except sockets and world-readable files. Raises OSError; the process must end then.

    The order is the security argument:

    1. Limits first: root may raise the hard limit of open files, another user may not.
    2. Dropping the bounding set needs CAP_SETPCAP, which the change of user removes. A container may lack it; then it
       has no capability that matters here, and step 5 keeps programs from gaining any.
    3. Groups before the user, which removes CAP_SETGID. Real, effective and saved ids at once: a saved uid of 0 would
       be a way back. With the last id, the kernel clears the permitted and effective sets.
    4. The kernel keeps the inheritable set; it is cleared here, and with it the ambient set.
    5. No new privileges: an executed program could not gain any. The filter needs this.
    6. Untraceable, and killed with the daemon: a change of user resets both, so they come after it.
    7. The filter is last, since it refuses some of the calls above.
    """
    os.umask(0o077)
    os.chdir("/")
    _limit()
    if confinement.uid is not None:
        with contextlib.suppress(PermissionError):
            privileges.drop_bounding_set()
        os.setgroups([])
        os.setresgid(confinement.uid, confinement.uid, confinement.uid)
        os.setresuid(confinement.uid, confinement.uid, confinement.uid)
        resource.setrlimit(resource.RLIMIT_NPROC, (_THREADS, _THREADS))
    privileges.drop_capabilities()
    privileges.gain_no_privileges()
    privileges.hide_memory()
    privileges.end_with_parent()
    if confinement.seccomp is not None:
        privileges.filter_system_calls(confinement.seccomp)


def _limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.geteuid() == 0 and hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        hard = OPEN_FILES
    files = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    except (OSError, ValueError):  # above fs.nr_open, or root without CAP_SYS_RESOURCE: keep the hard limit
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
