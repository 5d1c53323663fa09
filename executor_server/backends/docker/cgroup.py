"""Finds a container's control group on this host: it counts out-of-memory kills and weighs the processors.

The Engine's interface is not enough for either. It says whether an out-of-memory kill ended the container, not how many
processes the kernel killed while it lives; and changing a weight through it takes milliseconds, too long for each
change of the share. So the daemon reads and writes the kernel's own files.

The invariant: a group is used only when its path contains the container's id, 64 hexadecimal digits that no other group
has by accident. The daemon may live in a container of its own. There a process id of the Engine's host means another
process, or none, and the mount may show a part of the tree only. Without the check, the daemon would report another
service's kills as this session's, or slow down a service that is not its own.

Nothing here is required: where the group can't be found, kills are not counted, and processors are shared evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from executor_server.backends.control_groups import OOM_FILES, WEIGHT_FILES, groups_of_process, mounted_hierarchies

# Paths that the Engine gives to groups by default, with its own driver and with systemd's.
_DEFAULT_PATHS = ("docker/{id}", "system.slice/docker-{id}.scope")


class ContainerGroup(NamedTuple):
    directory: Path
    version: int


def cpu_group(container_id: str, proc: Path = Path("/proc")) -> ContainerGroup | None:
    """Returns the group that weighs the container's processors; None when it is not at one of the default paths.

    It needs no process id, so it does not have to ask the Engine, and a share can be set in the middle of a request.
    """
    for version, top in _trees(proc, "cpu"):
        for default in _DEFAULT_PATHS:
            path = top / default.format(id=container_id)
            if (path / WEIGHT_FILES[version]).exists():
                return ContainerGroup(path, version)
    return None


def memory_group(pid: int, container_id: str, proc: Path = Path("/proc")) -> ContainerGroup | None:
    """Returns the group that limits the container's memory; None when it can't be found.

    `pid` is the container's first process as the Engine numbers it. The process may end at any time and its number may
    be used again, so the path is accepted only if it contains the id. After that the path means the same
    group for ever: the Engine moves no group, and gives no id twice.
    """
    try:
        groups = groups_of_process((proc / str(pid) / "cgroup").read_text())
    except OSError:  # it has ended, or is not visible from here
        return None
    for version, top in _trees(proc, "memory"):
        group = groups.get("" if version == 2 else "memory", "")
        path = top / group.lstrip("/")
        if container_id in group and (path / OOM_FILES[version]).exists():
            return ContainerGroup(path, version)
    return None


def _trees(proc: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yields version and mount point of hierarchies that may have the controller and are mounted as a whole.

    A mount that shows only a part (in a container) is left out: a path relative to the tree's root means nothing there.
    Version 2 does not name its controllers in the mount, and a host with both versions may use it without any: so the
    callers look for the file that they need, and not only for the group.
    """
    try:
        mountinfo = (proc / "self" / "mountinfo").read_text()
    except OSError:
        return
    for hierarchy in mounted_hierarchies(mountinfo):
        if hierarchy.root == "/" and (hierarchy.version == 2 or controller in hierarchy.options):
            yield hierarchy.version, hierarchy.mount_point
