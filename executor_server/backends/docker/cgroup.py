"""Where the kernel counts a container's deaths for want of memory: its control group, found through its first process.

The Engine says whether such a death ended a container, not how many there were while it lives. The group is looked for
on this host and only believed if it bears the container's id: the daemon may live in a container of its own, where the
number of the process means somebody else, and where the hierarchy is not mounted as the host has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COUNTERS = {1: "memory.oom_control", 2: "memory.events"}  # by version


@dataclass(frozen=True)
class OomCounter:
    """The file in which the kernel counts."""

    path: Path

    def read(self) -> int | None:
        """How many processes it has killed; None where it does not count, or when the group is gone."""
        try:
            lines = self.path.read_text().splitlines()
        except OSError:
            return None
        counts = dict(line.split(" ", 1) for line in lines)
        return int(counts["oom_kill"]) if "oom_kill" in counts else None


def oom_counter(pid: int, container_id: str, proc: Path = Path("/proc")) -> OomCounter | None:
    """Of the group that limits the container's memory; None when it can't be found from here."""
    try:
        groups = (proc / str(pid) / "cgroup").read_text()
        mounts = (proc / "self" / "mountinfo").read_text()
    except OSError:  # it has ended, or is not to be seen from here
        return None
    for version, controllers, group in _groups(groups):
        if container_id not in group or (version == 1 and "memory" not in controllers):
            continue
        for mount_point in _mounts(mounts, version):
            path = mount_point / group.lstrip("/") / _COUNTERS[version]
            if path.exists():
                return OomCounter(path)
    return None


def _groups(text: str) -> Iterator[tuple[int, list[str], str]]:
    """(version, controllers, path) of each line of /proc/PID/cgroup; version 2 has no controllers named."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield (1, controllers.split(","), path) if controllers else (2, [], path)


def _mounts(mountinfo: str, version: int) -> Iterator[Path]:
    """Where hierarchies of that version are mounted whole; see proc(5)."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, mount_point = left.split()[3:5]
        if root != "/" or kind != ("cgroup2" if version == 2 else "cgroup"):
            continue
        if version == 2 or "memory" in options.split(","):
            yield Path(mount_point)
