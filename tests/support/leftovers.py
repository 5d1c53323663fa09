"""Things that a test may not leave behind: processes, cgroups, mounts, files, containers, addresses.

Each question is asked as a difference, so that a daemon which several tests share leaves nothing over until its
fixture ends; the end of the whole run is compared with its start.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import struct
import tempfile
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil

from executor_server.guest.wire.fork_server_messages import PARENT_NAME
from tests.support.fork_server import server_pid
from tests.support.own_addresses import addresses_of
from tests.support.polling import eventually
from tests.support.reaper import RUN_DIRECTORY_PREFIX, children

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_PREFIX = "executor-"
ENGINE_SOCKET = Path("/var/run/docker.sock")
ENGINE_TIMEOUT_S = 60.0
_CONTAINERS = "/containers/json?" + urlencode({"all": 1, "filters": json.dumps({"label": ["executor.daemon"]})})
# Mounts of the Engine that tools/engine.sh starts are any run's; of ours the containers are looked at.
ENGINE_MOUNTS = ("/var/lib/remote-executor-engine/", "/run/remote-executor-engine-")
# Begins the name of a daemon's directory. One that was there before a test is of a daemon that several tests share: it
# makes containers ahead, and ends them when it ends.
DAEMON_PREFIX = "d-"
# Seconds for a sandbox to disappear that is to end: the kernel takes a moment for namespaces and cgroups.
GONE_WITHIN_S = 15.0


@dataclass(frozen=True)
class Snapshot:
    processes: frozenset[int]
    files: frozenset[str]
    cgroups: frozenset[Path] | None  # None: not looked at
    mounts: frozenset[str] | None
    containers: frozenset[str] | None
    addresses: frozenset[str] | None


def snapshot(*, host: bool) -> Snapshot:
    """Processes and files always; with `host`, which costs milliseconds, also what the kernel holds for us."""
    return Snapshot(
        processes=frozenset(_processes()),
        files=frozenset(_files()),
        cgroups=frozenset(_cgroups()) if host else None,
        mounts=frozenset(_mounts()) if host else None,
        containers=frozenset(_container_ids()) if host else None,
        addresses=frozenset(addresses_of(os.getpid())) if host else None,
    )


def leftovers_since(before: Snapshot) -> list[str]:
    """A line for each thing that is new since `before` and stays."""
    remaining: list[str] = []
    looks: list[set[Path]] = []

    def all_gone() -> bool:
        # One that holds processes is another run's on this machine: ours have none, or the processes are listed. Another
        # run's is empty, too, as it begins and as it ends; what is left over is there at each look.
        looks.append(_empty_cgroups(before))
        remaining[:] = sorted(_leftovers(before) + [f"cgroup {path}" for path in set.intersection(*looks)])
        return not remaining

    eventually(all_gone, timeout_s=GONE_WITHIN_S)
    return remaining


def _leftovers(before: Snapshot) -> list[str]:
    found = [_describe(pid) for pid in _processes() - before.processes]
    found += [f"in the temporary directory: {name}" for name in _files() - before.files]
    if before.mounts is not None:
        found += [f"mount {line}" for line in _mounts() - before.mounts]
    if before.containers is not None and (new := _container_ids() - before.containers):
        shared = tuple(f"{tempfile.gettempdir()}/{name}/" for name in before.files if name.startswith(DAEMON_PREFIX))
        found += [f"container {name}" for number, name in _containers(shared).items() if number in new]
    if before.addresses is not None:
        found += [f"address {address}" for address in addresses_of(os.getpid()) - before.addresses]
    return found


def _empty_cgroups(before: Snapshot) -> set[Path]:
    if before.cgroups is None:
        return set()
    return {path for path in _cgroups() - before.cgroups if not _is_populated(path)}


def _processes() -> set[int]:
    tests, server = os.getpid(), server_pid()
    # A fork server lives as long as its backend, which several tests may share; closing that ends it. An orphaned one counts.
    found = {pid for pid in children(tests) if not _is_fork_server(pid)} | children(os.getppid())
    if server is not None:
        found |= children(server)
    return found - {tests, server}


def _is_fork_server(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == PARENT_NAME
    except OSError:  # ended meanwhile
        return False


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
    found: set[Path] = set()
    for parent in _cgroup_parents(os.getpid()):
        with contextlib.suppress(OSError):  # another program's, removed by now, or not ours to read
            found |= {parent / name for name in os.listdir(parent) if name.startswith(CGROUP_PREFIX)}  # noqa: PTH208
    return found


@functools.cache
def _cgroup_parents(pid: int) -> tuple[Path, ...]:
    """A process of tests stays in its groups."""
    own = [line.split(":", 2)[2].strip("/") for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    parents = [CGROUP_ROOT, *(path for path in CGROUP_ROOT.glob("*/") if not path.name.startswith(CGROUP_PREFIX))]
    below = [parent / path for parent in parents for path in own if path]
    return tuple({path.resolve() for path in (*parents, *below) if path.is_dir()})


def _is_populated(cgroup: Path) -> bool:
    try:
        return bool((cgroup / "cgroup.procs").read_text())
    except OSError:  # removed meanwhile
        return True


def _mounts() -> set[str]:
    """Mount points of our namespace that lie in the run's directory, or carry our name and lie in no other run's."""
    points = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    points = {point for point in points if not point.startswith(ENGINE_MOUNTS)}
    own = tempfile.gettempdir()  # BASE/rx-1234/tmp
    runs = str(Path(own).parents[1] / RUN_DIRECTORY_PREFIX)
    return {point for point in points if point.startswith(own) or ("executor" in point and not point.startswith(runs))}


class _EngineConnection(HTTPConnection):
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(ENGINE_SOCKET))


def _container_ids() -> set[str]:
    """Ids of containers, others' too where the Engine's directory can be read, which costs the Engine nothing."""
    if (directory := _engine_directory()) is not None:
        with contextlib.suppress(OSError):  # the Engine was restarted
            return set(os.listdir(directory))  # noqa: PTH208
    return set(_containers())


@functools.cache
def _engine_directory() -> Path | None:
    """The directory in which the Engine has one for each container, from its creation to its end, if we may read it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(ENGINE_SOCKET))
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        # Through the process that listens: the Engine may see other files than we do.
        directory = Path(f"/proc/{pid}/root{_ask_engine('/info')['DockerRootDir']}/containers")
        os.listdir(directory)  # noqa: PTH208
    except OSError:
        return None
    return directory


def _containers(shared: tuple[str, ...] = ()) -> dict[str, str]:
    """Containers that have our label and see something of the run's directory; others are another run's.

    Those that see something of a directory in `shared` are left out. Id to name: the daemon renames a container at a
    time of its own.
    """
    try:
        listed = _ask_engine(_CONTAINERS)
    except OSError:  # no Engine: no tests that need it either
        return {}
    own = tempfile.gettempdir()

    def is_ours(source: str) -> bool:
        return source.startswith(own) and not source.startswith(shared)

    return {one["Id"]: one["Names"][0] for one in listed if any(is_ours(mount["Source"]) for mount in one["Mounts"])}


def _ask_engine(path: str) -> Any:
    """Its SDK, which first asks for versions, would cost ten times as much. Raises OSError where there is no Engine."""
    connection = _EngineConnection("engine", timeout=ENGINE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        read = json.loads(answer.read())
    finally:
        connection.close()
    assert answer.status == HTTPStatus.OK, read
    return read
