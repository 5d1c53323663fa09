"""The daemon's limit of open files: raised as far as the system allows, and expressed in sessions.

Many systems give a program 1,024 by default and let it ask for more: the default is for programs that use `select`,
which knows no higher descriptors. The daemon uses epoll. With 1,024 it would be full at about 150 sessions.

Sandboxes do not inherit the daemon's limit: each has its own (guest/wire/rlimits.py), set before anything runs in it,
and so has the egress proxy.
"""

from __future__ import annotations

import resource

import structlog

from executor_server.backends import HostFinding

FILES_PER_SESSION = 6
"""Descriptors of one local session: its connection, its journal and head, and three for its sandbox's processes."""
OWN_FILES = 100
"""Descriptors of the daemon itself: event loop, gRPC, listeners, databases, the audit log, and clients' connections."""
# No daemon needs more. Some containers allow a thousand times as many, which only slows children that count up to their
# limit.
_MOST_FILES = 2**20

_log = structlog.get_logger(__name__)


def raise_limit() -> None:
    """Raises the soft limit of open files to the hard one. Must come before the first connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _reachable(hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # refused by a filter of system calls: the daemon serves with what it has
        _log.warning("open_files_not_raised", limit=soft, wanted=wanted, error=str(error))


def open_files_finding(max_sessions: int) -> HostFinding:
    """Returns the finding of `check-host` about the limit that the daemon will have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, _reachable(hard))
    sessions = max(0, files - OWN_FILES) // FILES_PER_SESSION
    detail = f"The daemon can open {files:,} files at a time, which is enough for about {sessions:,} sessions."
    if sessions >= max_sessions:
        return HostFinding("open files", True, detail, "", required=False)
    detail += f" sessions.max_sessions is {max_sessions:,}."
    remedy = "Raise the hard limit: LimitNOFILE= in the unit, --ulimit nofile= for a container, or ulimit -Hn."
    return HostFinding("open files", False, detail, remedy, required=False)


def _reachable(hard: int) -> int:
    return _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
