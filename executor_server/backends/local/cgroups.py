"""Memory, process and processor limits by control groups, in both versions of the kernel's interface.

Theory of operation. The kernel counts and limits the processes of a group together, whatever they fork, and no process
leaves its group without write access to the files of another one. A sandbox gets a group of its own, below a group that
this daemon may use, named `executor-<daemon>-<sandbox>`. It is made with its limits before the sandbox; bubblewrap
enters it before it makes the sandbox; and it is removed when no process is left in it.

Invariants, and what each prevents:

- Limits first, processes second. If a sandbox were started and then moved, its first children could be forked before
  the move, and would stay in the daemon's own group for ever: unlimited, uncounted and not found by the teardown. A
  process inherits its group at fork, so when the first one is in the group, none of the sandbox is ever outside.
- The code of a sandbox can't reach these files: no control group file system is mounted inside. Under root's daemon its
  user could not write to them on the host either. A group that it could leave or change would be no limit.
- The name carries the daemon's id, so that a group whose daemon was killed before it could record anything is found and
  removed by the next daemon of the state directory, and groups of other daemons are left alone.
- A group is killed until it is empty, never only once. A fork bomb may be in the middle of a fork when it is killed,
  and the child appears afterwards. And a killed process stays in the group until its parent reaps it; `rmdir` fails
  until then.

The two versions. Version 1 has a tree for each kind of limit, and any group may hold both processes and groups. Version
2 has one tree and a rule (no internal processes): a group that holds processes may not limit its children. So the
daemon uses, in this order: its own group, if that already limits children; its own group after moving itself, if it is
alone in it, one level down; the nearest group above that limits children and that it may write to.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.control_groups import (
    SOCKETS_FILE,
    SOCKETS_PART,
    Hierarchy,
    count_oom_kills,
    groups_of_process,
    mounted_hierarchies,
    set_cpu_share,
)
from executor_server.core import SandboxFailure

_PREFIX = "executor"
_OWN_LEAF = "executor-daemon"
_NEEDED = ("memory", "pids")
# Even without a quota, a group for cpu makes sandboxes share the processors evenly, however many processes each starts.
# cpuacct counts the used processor time in version 1; in version 2 every group counts it.
_WANTED = (*_NEEDED, "cpu", "cpuacct")
_PERIOD_US = 100_000  # the kernel's own default
_SHORTEST_QUOTA_US = 1_000  # the kernel takes no shorter one
BESIDE_SANDBOX = 1
"""Processes of the group that are not the sandbox's own: bubblewrap."""
_FIRST_RETRY_S = 0.002
_LONGEST_RETRY_S = 0.1


@dataclass(frozen=True)
class CgroupTrees:
    """The directories below which new groups can be made, one for each kind of limit that we may set."""

    version: int
    parents: dict[str, Path]  # controller -> directory; in version 2 all the same
    has_quotas: bool = True  # False for a kernel without limits of processor time

    def name(self, daemon_id: str, sandbox_id: str) -> str:
        return f"{_PREFIX}-{daemon_id}-{sandbox_id}"

    @property
    def limits_processors(self) -> bool:
        return self.has_quotas and "cpu" in self.parents

    def create(self, name: str, *, memory_bytes: int, processes: int, cpus: float | None = None) -> Cgroup:
        """Makes the group with its limits. Raises SandboxFailure, and leaves nothing, when the kernel refuses.

        `cpus`, the processors that it may use at a time, is ignored where `limits_processors` is false.
        """
        directories = {controller: parent / name for controller, parent in self.parents.items()}
        group = Cgroup(self.version, directories)
        try:
            for directory in group.unique_directories:
                directory.mkdir()
            # After all directories exist: the files in them show which settings the kernel has.
            settings = [*self._settings(directories, memory_bytes, processes), *self._quota(directories, cpus)]
            for directory, file, value in settings:
                (directory / file).write_text(value)
        except OSError as error:
            for directory in group.unique_directories:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    directory.rmdir()
            raise SandboxFailure(f"cannot make the control group {name}: {error}") from error
        return group

    def leftovers(self, daemon_id: str, living: Collection[str] = ()) -> list[Cgroup]:
        """Groups that carry this daemon's id and belong to none of the `living` sandboxes.

        A group of a sandbox that is being made is no leftover: the caller knows the id before the group exists.
        """
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
            yield directories["pids"], "pids.max", str(processes + BESIDE_SANDBOX)
        if "memory" not in directories:
            return
        memory = directories["memory"]
        if self.version == 2:
            yield memory, "memory.max", str(memory_bytes)
            # Without this a sandbox at its limit would be swapped out instead of killed, and slow the whole host down.
            if (memory / "memory.swap.max").exists():
                yield memory, "memory.swap.max", "0"
            return
        yield memory, "memory.limit_in_bytes", str(memory_bytes)
        # memsw limits memory and swap together. The kernel refuses a value below the limit of memory alone, and a new
        # group has no limit of either: so it comes second. A kernel without swap accounting has swappiness only.
        if (memory / "memory.memsw.limit_in_bytes").exists():
            yield memory, "memory.memsw.limit_in_bytes", str(memory_bytes)
        else:
            yield memory, "memory.swappiness", "0"
        if (memory / SOCKETS_FILE).exists():
            yield memory, SOCKETS_FILE, str(memory_bytes // SOCKETS_PART)

    def _quota(self, directories: dict[str, Path], cpus: float | None) -> Iterator[tuple[Path, str, str]]:
        if cpus is None or not self.limits_processors:
            return
        if self.version == 2:
            yield directories["cpu"], "cpu.max", f"{_quota_us(cpus)} {_PERIOD_US}"
            return
        # Version 1 refuses a quota above that of any group further up; version 2 accepts it and enforces the lowest. In
        # a container with one processor, a policy that grants two would otherwise make every creation fail.
        quota_us = _quota_us(min([cpus, *_processors_above(self.parents["cpu"])]))
        yield directories["cpu"], "cpu.cfs_period_us", str(_PERIOD_US)
        yield directories["cpu"], "cpu.cfs_quota_us", str(quota_us)


def _quota_us(cpus: float) -> int:
    return max(_SHORTEST_QUOTA_US, int(cpus * _PERIOD_US))


def _processors_above(group: Path) -> Iterator[float]:
    """Yields the quotas of a version 1 group and of those above it, as far as they are visible here."""
    for directory in (group, *group.parents):
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
        """Returns a command line of a shell that moves itself into the group and then becomes `command`.

        The shell runs before bubblewrap, so no moment exists in which a process of the sandbox is outside. `set -e`
        stops it when a move is refused: a sandbox without limits must not start.

        In version 1 it writes to `tasks`, which moves the writing thread in microseconds. `cgroup.procs` moves a whole
        process; the kernel then waits until no processor is in the middle of a fork: 9 ms as measured, during which no
        other group can be made. The shell has one thread, so both mean the same.
        """
        file = "cgroup.procs" if self.version == 2 else "tasks"
        files = [str(directory / file) for directory in self.unique_directories]
        moves = "".join(f'echo 0 > "${number}"; ' for number in range(1, len(files) + 1))
        return ["/bin/sh", "-c", f'set -e; {moves}shift {len(files)}; exec "$@"', "sh", *files, *command]

    def open_entrances(self) -> list[int]:
        """Opens files through which a process that receives them moves itself into the group; see `enter_and_run`.

        The kernel checks the rights of the process that opened them. Raises OSError.
        """
        file = "cgroup.procs" if self.version == 2 else "tasks"
        fds: list[int] = []
        try:
            for directory in self.unique_directories:
                fds.append(os.open(directory / file, os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def set_processes(self, processes: int) -> None:
        """Limits the processes of the group, where the kernel counts them. Raises OSError."""
        if "pids" in self.directories:
            (self.directories["pids"] / "pids.max").write_text(str(processes))

    def set_cpu_share(self, share: float) -> None:
        if "cpu" in self.directories:
            set_cpu_share(self.directories["cpu"], self.version, share)

    def open_cpu_counter(self) -> int | None:
        """Opens the file that counts the group's processor time; None when the kernel does not count it.

        The descriptor goes to the supervisor, which has no other access to the group: it can read this one file, and
        can't open anything from it.
        """
        directory = next(iter(self.directories.values())) if self.version == 2 else self.directories.get("cpuacct")
        if directory is None:
            return None
        try:
            return os.open(directory / ("cpu.stat" if self.version == 2 else "cpuacct.usage"), os.O_RDONLY)
        except FileNotFoundError:  # a kernel built without it
            return None

    def oom_kills(self) -> int | None:
        """Processes of the group that the kernel has killed for memory; None where it does not count them."""
        memory = self.directories.get("memory")
        return None if memory is None else count_oom_kills(memory, self.version)

    async def remove(self, deadline: float) -> None:
        """Kills every process inside and removes the group. Raises SandboxFailure when the deadline passes first.

        It tries `rmdir` first, which the kernel refuses while a process is inside. So a group is never removed from
        under a living process, and an empty one, the usual case, costs one system call.
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
    """Sends SIGKILL to every process of the group, once; the caller repeats it.

    `cgroup.kill` is atomic: the kernel also kills children that are forked meanwhile. The list of process ids is not: a
    fork bomb may outrun it, and a process may end and its id be used again before the signal. The window is a few
    microseconds, and no better way exists before Linux 5.14 and in version 1. In practice the sandbox's first process
    has been killed before, and with it its whole process namespace; this is for a sandbox whose creation was
    interrupted.
    """
    with contextlib.suppress(OSError):  # before Linux 5.14, and in version 1, there is no such file
        (directory / "cgroup.kill").write_text("1")
        return
    with contextlib.suppress(OSError):  # the group is removed already, or a process of it has ended
        for pid in (directory / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True)
class NoCgroups:
    """This host allows us to make no group that limits memory. The remedy is a sentence."""

    reason: str
    remedy: str


def discover_cgroups(
    mounts: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")
) -> CgroupTrees | NoCgroups:
    """Finds the groups below which this process may make others. Moves it into a leaf where version 2 needs that.

    A host may have both versions mounted. A controller works in one of them, so version 1 is used when it has memory.
    """
    parents: dict[str, Path] = {}
    unified: CgroupTrees | NoCgroups | None = None
    groups = groups_of_process(own.read_text())
    for hierarchy in mounted_hierarchies(mounts.read_text()):
        if hierarchy.version == 2:
            unified = _usable_v2(hierarchy.mount_point, _directory_of(groups.get("", "/"), hierarchy))
            continue
        for controller in _WANTED:
            directory = _directory_of(groups.get(controller, "/"), hierarchy)
            if controller in hierarchy.options and os.access(directory, os.W_OK):
                parents[controller] = directory
    if "memory" in parents:
        return CgroupTrees(1, parents)
    return unified or NoCgroups(
        "no control group hierarchy that limits memory is mounted here and writable",
        "Run the daemon where /sys/fs/cgroup is writable, as root or in a delegated group.",
    )


def _usable_v2(top: Path, own: Path) -> CgroupTrees | NoCgroups:
    """Looks for a group that limits its children, from our own upwards.

    `cgroup.procs` must be writable as well as the directory: to move a process, the kernel requires write access to
    that file of the common ancestor of both groups. A group that was not delegated to us is therefore found out here,
    and not when a sandbox can't enter its group.
    """
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
    """Enables limits below our own group, if we are alone in it, by moving ourselves one level down.

    Limits can't be enabled while the group holds a process. A process of another service is never moved: it would lose
    its place in its own service's limits. The race: a process that enters between the check and the last write makes
    that write fail (EBUSY), and the caller looks further up; the daemon then runs in the leaf, which harms nothing.
    """
    available = (own / "cgroup.controllers").read_text().split()
    enabled = (own / "cgroup.subtree_control").read_text().split()
    occupants = set((own / "cgroup.procs").read_text().split())
    if not set(_NEEDED).issubset(available) or set(_NEEDED).issubset(enabled) or occupants != {str(os.getpid())}:
        return
    leaf = own / _OWN_LEAF
    with contextlib.suppress(OSError):  # the caller sees that nothing was enabled
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _WANTED if name in available))


def _directory_of(group: str, hierarchy: Hierarchy) -> Path:
    """Returns the directory of our group. In a container the mount may show only a part of the hierarchy.

    The paths in /proc/self/cgroup and the mount's root are both relative to the tree's root. A group outside of the
    mounted part has no directory here; the top of the mount is then the only group that can be tried.
    """
    relative = os.path.relpath(group, hierarchy.root)
    directory = hierarchy.mount_point / relative
    return directory if not relative.startswith("..") and directory.is_dir() else hierarchy.mount_point
