"""Users of the host for the sandboxes of root's daemon: each live sandbox has one that no other process has.

A sandbox with a user of its own cannot use up another's per-user limits. If every other wall fell, it could reach what
that user may reach: nothing.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from executor_server.core import SandboxFailure

DEFAULT_UID_BASE = 2_000_000_000
"""Above the ids that distributions, container engines and systemd hand out, below negative numbers in 32 bits."""

_COUNT = 100_000_000  # large, so that two independent daemons on one host are unlikely to choose the same ids
UNIQUE_USERS = range(DEFAULT_UID_BASE, DEFAULT_UID_BASE + _COUNT)
"""Users that no program of the host has."""

UNNAMED_USERS = range(10_000, 65_534)
"""The same in a container or user namespace with few ids: lower ones are the distribution's, and 65534 stands for every
user of the host that has no id inside."""


class HostUsers:
    """Takes users from a range at random."""

    def __init__(self, uids: range) -> None:
        self._uids = uids
        self._taken: set[int] = set()

    def take(self) -> int:
        if len(self._taken) >= len(self._uids):
            raise SandboxFailure(f"all {len(self._uids)} host users for sandboxes are taken")
        while (uid := self._uids[secrets.randbelow(len(self._uids))]) in self._taken:
            pass
        self._taken.add(uid)
        return uid

    def reserve(self, uid: int) -> None:
        """Takes the user of an earlier daemon's sandbox."""
        self._taken.add(uid)

    def release(self, uid: int) -> None:
        self._taken.discard(uid)


def usable_uids(
    base: int, uid_map: Path = Path("/proc/self/uid_map"), gid_map: Path = Path("/proc/self/gid_map")
) -> range:
    """The range from `base` on, or in a container that has fewer ids, the upper part of its ids.

    A sandbox's group has the number of its user, so both must exist. Raises SandboxFailure when no range will do.
    """
    wanted = range(base, base + _COUNT)
    groups = _ranges(gid_map)
    if any(_within(wanted, users) for users in _ranges(uid_map)) and any(_within(wanted, ids) for ids in groups):
        return wanted
    for users in _ranges(uid_map):
        found = range(max(users.start, UNNAMED_USERS.start), min(users.stop, UNNAMED_USERS.stop))
        if found and any(_within(found, ids) for ids in groups):
            return found
    raise SandboxFailure(
        f"user {base} does not exist in this container, and none between {UNNAMED_USERS.start} and {UNNAMED_USERS.stop}"
    )


def unlisted_uid() -> int:
    """Returns a user for a process of the daemon's own that reads hostile bytes. Raises SandboxFailure."""
    return HostUsers(usable_uids(DEFAULT_UID_BASE)).take()


def _ranges(id_map: Path) -> list[range]:
    """Reads the ids that exist here from a file of three columns: first id inside, first id outside, count."""
    columns = [[int(number) for number in line.split()] for line in id_map.read_text().splitlines()]
    return [range(first, first + count) for first, _, count in columns]


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
