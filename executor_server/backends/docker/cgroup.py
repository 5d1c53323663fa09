"""A container's control group: where the kernel counts deaths for want of memory, and weighs the share of processors.

The Engine says whether such a death ended a container, not how many there were while it lives; and would take
milliseconds for a weight. The group is looked for on this host and only believed if it bears the container's id: the
daemon may live in a container of its own, where the number of the process means somebody else, and where the hierarchy
is not mounted as the host has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.cpu_share import set_cpu_share

# Where the Engine makes them unless it is told otherwise, with its own driver and with systemd's.
_PLACES = ("docker/{id}", "system.slice/docker-{id}.scope")
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


@dataclass(frozen=True)
class CpuGroup:
    """The group that a container's share of processors is weighed by."""

    path: Path
    version: int

    def set_share(self, share: float) -> None:
        set_cpu_share(self.path, self.version, share)


def cpu_group(container_id: str, proc: Path = Path("/proc")) -> CpuGroup | None:
    """None when it is not where the Engine usually makes it, or can't be seen from here."""
    try:
        mounts = (proc / "self" / "mountinfo").read_text()
    except OSError:
        return None
    for version in _COUNTERS:
        for mount_point in _mounts(mounts, version, "cpu"):
            for place in _PLACES:
                path = mount_point / place.format(id=container_id)
                if path.is_dir():
                    return CpuGroup(path, version)
    return None


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
        for mount_point in _mounts(mounts, version, "memory"):
            path = mount_point / group.lstrip("/") / _COUNTERS[version]
            if path.exists():
                return OomCounter(path)
    return None


def _groups(text: str) -> Iterator[tuple[int, list[str], str]]:
    """(version, controllers, path) of each line of /proc/PID/cgroup; version 2 has no controllers named."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield (1, controllers.split(","), path) if controllers else (2, [], path)


def _mounts(mountinfo: str, version: int, controller: str) -> Iterator[Path]:
    """Where hierarchies of that version, and with that controller, are mounted whole; see proc(5)."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        root, mount_point = left.split()[3:5]
        if root != "/" or kind != ("cgroup2" if version == 2 else "cgroup"):
            continue
        if version == 2 or controller in options.split(","):
            yield Path(mount_point)
