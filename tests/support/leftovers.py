"""What a test may not leave behind: processes, cgroups, mounts, files, containers.

Each question is asked as a difference, so that a daemon which several tests share is nobody's leftover until its
fixture ends; the end of the whole run is compared with its start.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors
import psutil

from tests.support.keeper import children
from tests.support.polling import eventually

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_PREFIX = "executor-"
ENGINE_SOCKET = Path("/var/run/docker.sock")
# Of the Engine that tools/engine.sh starts: what is mounted there is any run's; of ours the containers are looked at.
ENGINE_MOUNTS = ("/var/lib/remote-executor-engine/", "/run/remote-executor-engine-")
# A sandbox that was told to end has this long to be gone: the kernel takes a moment for namespaces and cgroups.
GONE_WITHIN_S = 5.0


@dataclass(frozen=True)
class Snapshot:
    processes: frozenset[int]
    files: frozenset[str]
    cgroups: frozenset[Path] | None  # None: not looked at
    mounts: frozenset[str] | None
    containers: frozenset[str] | None


def snapshot(*, host: bool) -> Snapshot:
    """Processes and files always; with `host`, which costs milliseconds, also what the kernel holds for us."""
    return Snapshot(
        processes=frozenset(_processes()),
        files=frozenset(_files()),
        cgroups=frozenset(_cgroups()) if host else None,
        mounts=frozenset(_mounts()) if host else None,
        containers=frozenset(_containers()) if host else None,
    )


def leftovers_since(before: Snapshot) -> list[str]:
    """What is new since `before` and does not go away, a line for each."""
    remaining: list[str] = []

    def all_gone() -> bool:
        remaining[:] = _leftovers(before)
        return not remaining

    eventually(all_gone, timeout_s=GONE_WITHIN_S)
    return remaining


def _leftovers(before: Snapshot) -> list[str]:
    found = [_describe(pid) for pid in _processes() - before.processes]
    found += [f"in the temporary directory: {name}" for name in _files() - before.files]
    if before.cgroups is not None:
        # One that holds processes is another run's on this machine: ours have none, or the processes are listed above.
        found += [f"cgroup {path}" for path in _cgroups() - before.cgroups if not _is_populated(path)]
    if before.mounts is not None:
        found += [f"mount {line}" for line in _mounts() - before.mounts]
    if before.containers is not None:
        found += [f"container {name}" for number, name in _containers().items() if number not in before.containers]
    return sorted(found)


def _processes() -> set[int]:
    tests = os.getpid()
    return (children(tests) | children(os.getppid())) - {tests}


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"process {pid} ({process.status()}): {' '.join(process.cmdline())[:200] or process.name()}"
    except psutil.NoSuchProcess:
        return f"process {pid}, gone by now"


def _files() -> set[str]:
    return set(os.listdir(tempfile.gettempdir()))  # noqa: PTH208 - names only, and often


def _cgroups() -> set[Path]:
    """Ours, to the depth at which a daemon makes them: below a controller (v1), or below its own cgroup (v2)."""
    own = [line.split(":", 2)[2].strip("/") for line in Path("/proc/self/cgroup").read_text().splitlines()]
    parents = {CGROUP_ROOT, *CGROUP_ROOT.glob("*/")}
    parents |= {parent / path for parent in tuple(parents) for path in own if path}
    return {path for parent in parents for path in parent.glob(f"{CGROUP_PREFIX}*")}


def _is_populated(cgroup: Path) -> bool:
    try:
        return bool((cgroup / "cgroup.procs").read_text())
    except OSError:  # removed meanwhile
        return True


def _mounts() -> set[str]:
    """Mount points of our namespace that carry our name or lie in the run's directory."""
    points = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    points = {point for point in points if not point.startswith(ENGINE_MOUNTS)}
    return {point for point in points if "executor" in point or point.startswith(tempfile.gettempdir())}


def _containers() -> dict[str, str]:
    """Those that bear our label and see something of the run's directory; others are another run's.

    Id to name: the daemon renames a container at a time of its own.
    """
    if not os.access(ENGINE_SOCKET, os.W_OK):
        return {}
    try:
        client = docker.APIClient(f"unix://{ENGINE_SOCKET}")
    except docker.errors.DockerException:  # nobody there: no tests that need it either
        return {}
    try:
        listed = client.containers(all=True, filters={"label": "executor.daemon"})
    finally:
        client.close()
    own = tempfile.gettempdir()
    return {
        one["Id"]: one["Names"][0] for one in listed if any(mount["Source"].startswith(own) for mount in one["Mounts"])
    }
