"""Users of the host for the sandboxes of root's daemon: each live sandbox has one that is nobody else's.

A sandbox with a user of its own cannot use up another's per-user limits, and what it could reach if every other wall
fell is what that user may reach: nothing.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from executor_server.errors import SandboxFailure

DEFAULT_UID_BASE = 2_000_000_000
"""Above what distributions, container engines and systemd hand out, below what is a negative number in 32 bits."""

_COUNT = 100_000_000  # so many that two daemons on one host, which know nothing of each other, hardly meet
# In a container with few ids: below are those of its distribution; and 65534 is everybody whose user has no name here.
_FIRST_UNNAMED = 10_000
_NOBODY = 65_534


class HostUsers:
    """Hands out users from a range."""

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
        """Marks one as taken that a sandbox of an earlier daemon has."""
        self._taken.add(uid)

    def release(self, uid: int) -> None:
        self._taken.discard(uid)


def usable_uids(
    base: int, uid_map: Path = Path("/proc/self/uid_map"), gid_map: Path = Path("/proc/self/gid_map")
) -> range:
    """The range from `base` on, or in a container that has fewer ids, the upper part of those it has.

    A sandbox's group has the number of its user, so both must be there. Raises SandboxFailure when no range will do.
    """
    wanted = range(base, base + _COUNT)
    groups = _ranges(gid_map)
    if any(_within(wanted, users) for users in _ranges(uid_map)) and any(_within(wanted, ids) for ids in groups):
        return wanted
    for users in _ranges(uid_map):
        found = range(max(users.start, _FIRST_UNNAMED), min(users.stop, _NOBODY))
        if found and any(_within(found, ids) for ids in groups):
            return found
    raise SandboxFailure(
        f"user {base} does not exist in this container, and none between {_FIRST_UNNAMED} and {_NOBODY}"
    )


def _ranges(id_map: Path) -> list[range]:
    """The ids that exist here, from a file of three columns: first id inside, first id outside, count."""
    columns = [[int(number) for number in line.split()] for line in id_map.read_text().splitlines()]
    return [range(first, first + count) for first, _, count in columns]


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop
