"""Takes from the proxy's process what it does not need, before it reads its first byte from a sandbox."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass

from executor_server.guest.wire import privileges

# Sockets: two for each connection, of which 500 sessions may have 32 and hardly ever do.
OPEN_FILES = 65_536
# For leaf certificates, which are memory files for a moment. Nothing else is ever written.
_FILE_BYTES = 65_536
# Threads that resolve names, and those of the loop. Nothing is ever executed.
_THREADS = 128


@dataclass(frozen=True)
class Confinement:
    """As the daemon decided: a user that no other process has, where it is root; and the sandboxes' filter."""

    uid: int | None
    seccomp: bytes | None


def confine(confinement: Confinement) -> None:
    """Gives up all but sockets and reading what everybody can. Raises OSError; the process must then end.

    The order is the security argument:

    1. Limits first: root may raise the hard limit of open files, another user may not.
    2. The bounding set needs CAP_SETPCAP, which the change of user takes away. A container may lack it; then it holds
       no capability that matters here, and step 5 keeps programs from gaining any.
    3. Groups before the user, which takes CAP_SETGID away. Real, effective and saved ids at once: a saved uid of 0
       would be a way back. With the last of them the kernel clears the permitted and effective sets.
    4. The inheritable set is kept by the kernel, and cleared here; with it the ambient set.
    5. No new privileges: no program that was executed would gain any. The filter needs it.
    6. Not to be traced, and to die with the daemon: both are undone by a change of user, so they come after it.
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
    except (OSError, ValueError):  # above fs.nr_open, or root without CAP_SYS_RESOURCE: what there is must do
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
