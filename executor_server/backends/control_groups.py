"""The files of the kernel's control groups that the local and the Docker backend use alike, in both versions.

Version 1 mounts a tree for each kind of limit (controller), and a process is in one group of each tree. Version 2 has
one tree for all controllers. A host may mount both; a controller then works in one of them only. All names of files and
the meaning of their text are the kernel's: Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# By version: the file, the weight of a whole share, the least that the kernel accepts. The whole share is the kernel's
# weight for a new group, so next to the host's other programs a sandbox weighs as much as without this; only sandboxes
# that divide a share weigh less.
_WEIGHTS = {1: ("cpu.shares", 1024, 2), 2: ("cpu.weight", 100, 1)}
WEIGHT_FILES = {version: name for version, (name, _, _) in _WEIGHTS.items()}
SOCKETS_FILE = "memory.kmem.tcp.limit_in_bytes"
"""Version 1 counts the memory of TCP and UDP sockets separately; version 2 counts it with all other memory."""
SOCKETS_PART = 8
"""Where sockets are counted separately, they get this part (one eighth) of the sandbox's memory in addition."""
OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True)
class Hierarchy:
    """One mount of a tree of control groups."""

    version: int
    root: str  # the group that the mount shows at its top; in a container often not the tree's own root
    mount_point: Path
    options: frozenset[str]  # in version 1 the controllers are among them


def mounted_hierarchies(mountinfo: str) -> Iterator[Hierarchy]:
    """Reads /proc/PID/mountinfo; see proc(5)."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, mount_point = left.split()[3:5]
            yield Hierarchy(2 if kind == "cgroup2" else 1, root, Path(mount_point), frozenset(options.split(",")))


def groups_of_process(text: str) -> dict[str, str]:
    """Reads /proc/PID/cgroup: controller to group, relative to the tree's root; version 2 has the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def set_cpu_share(directory: Path, version: int, share: float) -> None:
    """Sets the group's part, up to 1, of a sandbox's full share of scarce processors. Best effort.

    When the group is missing, or not ours to weigh, nothing is written and nothing depends on it.
    """
    name, whole, least = _WEIGHTS[version]
    with contextlib.suppress(OSError):
        # Without O_CREAT: a directory that is no control group gets no file.
        fd = os.open(directory / name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, str(max(least, round(whole * share))).encode())
        finally:
            os.close(fd)


def count_oom_kills(directory: Path, version: int) -> int | None:
    """Processes of the group that the kernel killed for memory; None when it does not count or the group is missing."""
    try:
        lines = (directory / OOM_FILES[version]).read_text().splitlines()
    except OSError:  # ENOENT, or ENODEV when the group is removed between open and read
        return None
    counts = dict(line.split(" ", 1) for line in lines)
    return int(counts["oom_kill"]) if "oom_kill" in counts else None
