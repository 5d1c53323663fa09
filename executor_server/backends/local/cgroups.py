"""Memory, process and processor limits by control groups, in both versions of the kernel's interface.

A sandbox gets a group of its own, below a group that this daemon may use, named `executor-<daemon>-<sandbox>` so that
another daemon of the same state directory can find it. The group is made before the sandbox; bubblewrap starts in it,
so that nothing of the sandbox is ever outside; and it is removed when nothing is left in it.

Version 2 has one tree, and a group with processes of its own may not limit its children. So the daemon uses, in this
order: its own group if that already limits children; its own group after moving itself, and nobody else, one level
down; the nearest group above that limits children and that it may write to. Version 1 has a tree for each kind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends import cpu_share
from executor_server.errors import SandboxFailure

_PREFIX = "executor"
_OWN_LEAF = "executor-daemon"
_NEEDED = ("memory", "pids")
# Even without a limit, cpu makes sandboxes share the processors evenly, whatever they start. In version 1 it is cpuacct
# that counts what they use; in version 2 every group does.
_WANTED = (*_NEEDED, "cpu", "cpuacct")
_PERIOD_US = 100_000  # the kernel's own default
_SHORTEST_QUOTA_US = 1_000  # the kernel takes no shorter one
_FIRST_RETRY_S = 0.002
_LONGEST_RETRY_S = 0.1


@dataclass(frozen=True)
class CgroupTrees:
    """Where new groups can be made: one directory for each kind of limit that this host lets us set."""

    version: int
    parents: dict[str, Path]  # controller -> directory; in version 2 all the same
    has_quotas: bool = True  # whether the kernel was built to limit processor time

    def name(self, daemon_id: str, sandbox_id: str) -> str:
        return f"{_PREFIX}-{daemon_id}-{sandbox_id}"

    @property
    def limits_processors(self) -> bool:
        return self.has_quotas and "cpu" in self.parents

    def create(self, name: str, *, memory_bytes: int, processes: int, cpus: float | None = None) -> Cgroup:
        """Makes the group with its limits. Raises SandboxFailure, and leaves nothing, when the kernel refuses.

        `cpus`, the processors that it may use at a time, is disregarded where `limits_processors` is false.
        """
        directories = {controller: parent / name for controller, parent in self.parents.items()}
        group = Cgroup(self.version, directories)
        try:
            for directory in group.unique_directories:
                directory.mkdir()
            # Once the directories are there, since what can be set shows by their files.
            settings = [*self._settings(directories, memory_bytes, processes), *self._quota(directories, cpus)]
            for directory, file, value in settings:
                (directory / file).write_text(value)
        except OSError as error:
            for directory in group.unique_directories:
                with contextlib.suppress(OSError):  # the first error is the one to tell
                    directory.rmdir()
            raise SandboxFailure(f"cannot make the control group {name}: {error}") from error
        return group

    def leftovers(self, daemon_id: str, living: Collection[str] = ()) -> list[Cgroup]:
        """Groups that bear this daemon's id and are those of none of the `living` sandboxes."""
        kept = {self.name(daemon_id, sandbox_id) for sandbox_id in living}
        found: dict[str, dict[str, Path]] = {}
        for controller, parent in self.parents.items():
            for directory in parent.glob(f"{_PREFIX}-{daemon_id}-*"):
                if directory.name not in kept:
                    found.setdefault(directory.name, {})[controller] = directory
        return [Cgroup(self.version, directories) for directories in found.values()]

    def _settings(
        self, directories: dict[str, Path], memory_bytes: int, processes: int
    ) -> Iterator[tuple[Path, str, str]]:
        if "pids" in directories:
            yield directories["pids"], "pids.max", str(processes + 1)  # bubblewrap itself is in the group too
        if "memory" not in directories:
            return
        memory = directories["memory"]
        if self.version == 2:
            yield memory, "memory.max", str(memory_bytes)
            if (memory / "memory.swap.max").exists():
                yield memory, "memory.swap.max", "0"
            return
        yield memory, "memory.limit_in_bytes", str(memory_bytes)
        if (memory / "memory.memsw.limit_in_bytes").exists():  # memory and swap together; after the one above
            yield memory, "memory.memsw.limit_in_bytes", str(memory_bytes)
        else:
            yield memory, "memory.swappiness", "0"

    def _quota(self, directories: dict[str, Path], cpus: float | None) -> Iterator[tuple[Path, str, str]]:
        if cpus is None or not self.limits_processors:
            return
        if self.version == 2:
            yield directories["cpu"], "cpu.max", f"{_quota_us(cpus)} {_PERIOD_US}"
            return
        # In version 1 a group is refused more than a group above it has; in version 2 the lowest of them counts.
        quota_us = _quota_us(min([cpus, *_processors_above(self.parents["cpu"])]))
        yield directories["cpu"], "cpu.cfs_period_us", str(_PERIOD_US)
        yield directories["cpu"], "cpu.cfs_quota_us", str(quota_us)


def _quota_us(cpus: float) -> int:
    return max(_SHORTEST_QUOTA_US, int(cpus * _PERIOD_US))


def _processors_above(place: Path) -> Iterator[float]:
    """The limits of a version 1 group and of those above it, as far as they can be seen."""
    for directory in (place, *place.parents):
        try:
            quota_us = int((directory / "cpu.cfs_quota_us").read_text())
            period_us = int((directory / "cpu.cfs_period_us").read_text())
        except FileNotFoundError:  # above the top
            return
        if quota_us > 0:
            yield quota_us / period_us


@dataclass(frozen=True)
class Cgroup:
    """The control group of one sandbox."""

    version: int
    directories: dict[str, Path]

    @property
    def unique_directories(self) -> list[Path]:
        return list(dict.fromkeys(self.directories.values()))

    def enter_and_run(self, command: Sequence[str]) -> list[str]:
        """The command line that moves itself into the group, then becomes `command`.

        A process that moves itself, alone, costs microseconds in version 1. Moving another one by `cgroup.procs` makes
        the kernel wait until no processor is in the middle of a fork: 9 ms here, during which no group can be made.
        """
        file = "cgroup.procs" if self.version == 2 else "tasks"
        files = [str(directory / file) for directory in self.unique_directories]
        moves = "".join(f'echo 0 > "${number}"; ' for number in range(1, len(files) + 1))
        return ["/bin/sh", "-c", f'set -e; {moves}shift {len(files)}; exec "$@"', "sh", *files, *command]

    def set_cpu_share(self, share: float) -> None:
        """Where the host lets us weigh it; see cpu_share.py."""
        if "cpu" in self.directories:
            cpu_share.set_cpu_share(self.directories["cpu"], self.version, share)

    def open_cpu_counter(self) -> int | None:
        """A descriptor of the file that says how much processor time the group has used; None where nothing counts."""
        directory = next(iter(self.directories.values())) if self.version == 2 else self.directories.get("cpuacct")
        if directory is None:
            return None
        try:
            return os.open(directory / ("cpu.stat" if self.version == 2 else "cpuacct.usage"), os.O_RDONLY)
        except FileNotFoundError:  # a kernel that was built without
            return None

    def oom_kills(self) -> int | None:
        """How many of its processes the kernel killed for memory; None where it does not count, or is gone."""
        memory = self.directories.get("memory")
        if memory is None:
            return None
        try:
            lines = (memory / ("memory.events" if self.version == 2 else "memory.oom_control")).read_text().splitlines()
        except FileNotFoundError:
            return None
        counts = dict(line.split(" ", 1) for line in lines)
        return int(counts["oom_kill"]) if "oom_kill" in counts else None

    async def remove(self, deadline: float) -> None:
        """Kills what is still inside and removes the group. Raises SandboxFailure when the deadline passes first.

        Repeats, since a killed process stays in its group until it is reaped, and a fork bomb may be mid-fork.
        """
        pause_s = _FIRST_RETRY_S
        while True:
            problem = self._try_remove()
            if problem is None:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise SandboxFailure(f"cannot remove a control group: {problem}") from problem
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    def _try_remove(self) -> OSError | None:
        problem = None
        for directory in self.unique_directories:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError as error:
                problem = error
                _kill_all(directory)
        return problem


def _kill_all(directory: Path) -> None:
    with contextlib.suppress(OSError):  # before Linux 5.14, and in version 1, there is no such file
        (directory / "cgroup.kill").write_text("1")
        return
    with contextlib.suppress(OSError):  # the group is gone, or a process of it
        for pid in (directory / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True)
class NoCgroups:
    """Why this host lets us make no group that limits memory, and what would change that."""

    reason: str
    remedy: str


def discover_cgroups(
    mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
) -> CgroupTrees | NoCgroups:
    """Finds where this process may make groups. Moves the process into a leaf where version 2 needs that."""
    parents: dict[str, Path] = {}
    unified: CgroupTrees | NoCgroups | None = None
    groups = _own_groups(own.read_text())
    for root, mount_point, kind, options in _mounted_hierarchies(mounts.read_text()):
        if kind == "cgroup2":
            unified = _usable_v2(mount_point, _place(root, mount_point, groups.get("", "/")))
            continue
        for controller in _WANTED:
            place = _place(root, mount_point, groups.get(controller, "/"))
            if controller in options and os.access(place, os.W_OK):
                parents[controller] = place
    if "memory" in parents:
        return CgroupTrees(1, parents)
    if isinstance(unified, CgroupTrees):
        return unified
    return unified or NoCgroups(
        "no control group hierarchy that limits memory is mounted here and writable",
        "Run the daemon where /sys/fs/cgroup is writable, as root or in a delegated group.",
    )


def _usable_v2(top: Path, own: Path) -> CgroupTrees | NoCgroups:
    for candidate in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
        if not (os.access(candidate, os.W_OK) and os.access(candidate / "cgroup.procs", os.W_OK)):
            continue
        if candidate == own:
            _become_leaf(own)
        enabled = set((candidate / "cgroup.subtree_control").read_text().split())
        if enabled.issuperset(_NEEDED):
            return CgroupTrees(2, {controller: candidate for controller in _WANTED if controller in enabled})
    return NoCgroups(
        f"the control group {own} is not delegated to this process, or other processes are in it",
        "Start the daemon in a group of its own: systemd-run --user --scope -p Delegate=yes executor-server serve.",
    )


def _become_leaf(own: Path) -> None:
    """Enables limits below our own group, if we are alone in it. Moving anybody else's process is not ours to do."""
    available = (own / "cgroup.controllers").read_text().split()
    enabled = (own / "cgroup.subtree_control").read_text().split()
    occupants = set((own / "cgroup.procs").read_text().split())
    if not set(_NEEDED).issubset(available) or set(_NEEDED).issubset(enabled) or occupants != {str(os.getpid())}:
        return
    leaf = own / _OWN_LEAF
    with contextlib.suppress(OSError):  # refused: the caller sees that nothing was enabled, and looks further up
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _WANTED if name in available))


def _own_groups(text: str) -> dict[str, str]:
    """Controller -> our group, from /proc/self/cgroup; version 2 has the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _mounted_hierarchies(mountinfo: str) -> Iterator[tuple[str, Path, str, Sequence[str]]]:
    """(root of the mount within the hierarchy, mount point, file system type, super options); see proc(5)."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            yield fields[3], Path(fields[4]), kind, options.split(",")


def _place(root: str, mount_point: Path, group: str) -> Path:
    """Where our group is in the file system; in a container the mount may show only a part of the hierarchy."""
    relative = os.path.relpath(group, root)
    place = mount_point / relative
    return place if not relative.startswith("..") and place.is_dir() else mount_point
