"""A Ray cluster on this machine alone, for trials and the demo: some raylets, each with its own loopback address.

`cluster.json` identifies our processes. It is written before the first start, with the directory that Ray's processes
have in their environment, so `stop_cluster` also finds everything after a start that was killed halfway. Unlike
`ray stop`, it ends no other Ray of the machine.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.fleet.ray.daemon import EndedAtOnce, FleetError, OwnDaemon
from executor_server.fleet.ray.layout import NAME_LABEL, RESOURCE
from executor_server.fleet.ray.processes import ProcessIdentity, identity_of, session_members, write_whole

START_TIME_S = 90.0
"""Seconds for one node to run; a loaded machine of two cores takes twenty."""
START_ATTEMPTS = 2
"""Attempts to start a node. Ray's own limit for a part of a start is 30 s, which a loaded machine may need."""
STOP_TIME_S = 3.0
"""Seconds that Ray's processes get to end in order; after them they are killed, which harms nothing."""
KILL_TIME_S = 10.0
"""Seconds in which killed processes must have ended; one that waits in the kernel for a dead disk takes longer."""
POLL_S = 0.1
MAX_FILE_BYTES = 64 * 1024

# Short, since the path of Ray's sockets below it has at most 107 bytes.
_TEMPORARY_PREFIX = "rx-ray-"
# A variable that only Ray's processes have: a user may set Ray's own ones for Ray's commands, and the arguments of a
# process may name a log. The daemons that actors start don't get it (detach.py).
_MARK = "RAY_EXECUTOR_CLUSTER"
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""About the least that Ray takes. Nothing of a session passes through it."""
_SETTINGS = {
    # A raylet that is dead is known as such in about a second; it takes 14 s by default.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    # The default is 30 s; a loaded machine may need longer.
    "RAY_raylet_start_wait_time_s": f"{START_TIME_S:.0f}",
    # Workers are started for our actors only, and a daemon gets the priority of the process that starts the cluster.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class ClusterError(FleetError):
    """The local cluster could not be started."""


@dataclass(frozen=True)
class LocalCluster:
    """The content of `cluster.json`."""

    temporary: Path
    port: int
    number: int

    @property
    def address(self) -> str:
        return f"{_host(0)}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for Ray's part of a process that belongs to the cluster."""
        # The token keeps other users of this machine out, who could run code in the cluster otherwise.
        return {**_SETTINGS, "RAY_AUTH_TOKEN_PATH": str(self.temporary / "token")}

    @property
    def nodes(self) -> list[OwnDaemon]:
        """Each is the leader of the session (setsid) that all processes of a Ray node are in."""
        return [OwnDaemon(self.temporary, f"local-{index + 1}") for index in range(self.number)]

    @property
    def has_head(self) -> bool:
        """True while the head answers. Ray itself takes minutes to notice that it is gone."""
        return _answers(_host(0), self.port)

    def processes(self) -> list[ProcessIdentity]:
        """Returns all processes: in the sessions of the nodes, or with the directory in their environment."""
        leaders = [identity for node in self.nodes if (identity := node.identity()) is not None]
        found = {member for leader in leaders for member in session_members(leader.pid)}
        return sorted(found | _processes_with(f"{_MARK}={self.temporary}"), key=lambda process: process.pid)


def read_cluster(path: Path) -> LocalCluster | None:
    """Returns the cluster that the file describes, or None. Raises ClusterError."""
    try:
        with path.open("rb") as file:
            fields = json.loads(file.read(MAX_FILE_BYTES))
        return LocalCluster(Path(fields["temporary"]), int(fields["port"]), int(fields["number"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(f"The file {path} does not describe a cluster; remove it when no Ray of it runs.") from error


def start_cluster(path: Path, number: int) -> LocalCluster:
    """Starts a cluster with this number of nodes and writes the file. On FleetError nothing is left running."""
    cluster = LocalCluster(Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir="/tmp")), _free_port(), number)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fields = {"temporary": str(cluster.temporary), "port": cluster.port, "number": number}
    write_whole(path, json.dumps(fields).encode())
    try:
        write_whole(cluster.temporary / "token", secrets.token_hex(32).encode())
        _start_nodes(cluster)
    except BaseException:
        stop_cluster(path)
        raise
    return cluster


def stop_cluster(path: Path) -> None:
    """Ends the cluster that the file describes, and removes its files. Idempotent. Raises ClusterError."""
    cluster = read_cluster(path)
    if cluster is None:
        return
    # Collected before the leaders end: after that a leader's number no longer leads to the rest of its session.
    seen = set(cluster.processes())
    for node in reversed(cluster.nodes):
        if (leader := node.identity()) is not None:
            leader.send(signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIME_S
    while left := _alive(seen | set(cluster.processes())):
        if time.monotonic() > deadline + KILL_TIME_S:
            pids = ", ".join(str(process.pid) for process in left)
            raise ClusterError(f"Ray's processes {pids} were killed and have not ended; try again later.")
        if time.monotonic() > deadline:
            # Repeated: a killed process may have started another one before.
            for process in left:
                process.send(signal.SIGKILL)
        time.sleep(POLL_S)
    shutil.rmtree(cluster.temporary, ignore_errors=True)
    path.unlink()


def _alive(processes: Iterable[ProcessIdentity]) -> list[ProcessIdentity]:
    return [process for process in processes if process.is_alive]


def _start_nodes(cluster: LocalCluster) -> None:
    """Starts the nodes one after the other: started together, they compete for the processor and time out."""
    # The server for remote drivers can't be left out, so it gets a port that nothing else wants.
    head = [
        "--head",
        f"--port={cluster.port}",
        f"--temp-dir={cluster.temporary}",
        "--include-dashboard=false",
        f"--ray-client-server-port={_free_port()}",
    ]
    _start_node(cluster, 0, head)
    for index in range(1, cluster.number):
        _start_node(cluster, index, [f"--address={cluster.address}"])
    for node in cluster.nodes:
        if node.identity() is None:
            raise ClusterError(f"Ray's node {node.name} has ended after its start:\n{node.log_tail()}")


def _start_node(cluster: LocalCluster, index: int, options: Sequence[str]) -> None:
    """Returns when the node runs. Raises ClusterError when it did not start in several attempts."""
    node = cluster.nodes[index]
    for _ in range(START_ATTEMPTS):
        try:
            leader = node.start(_command(cluster, index, options)).identity.pid
            if _runs_in_time(node):
                return
        except EndedAtOnce as error:
            leader = error.pid
        _kill_session(leader)
    raise ClusterError(
        f"Ray's node {node.name} ({index + 1} of {cluster.number}) did not start in {START_ATTEMPTS} attempts. Where "
        f"the machine is too busy, fewer nodes may start. The end of {node.log_file}:\n{node.log_tail()}"
    )


def _command(cluster: LocalCluster, index: int, options: Sequence[str]) -> list[str]:
    # By `env`, since a detached process inherits no variables of Ray.
    variables = {**cluster.environment, _MARK: str(cluster.temporary)}
    settings = [f"{name}={value}" for name, value in variables.items()]
    return [
        *("env", *settings, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
        *("--num-cpus=1", "--num-gpus=0", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
        *(f"--node-ip-address={_host(index)}", f"--resources={json.dumps({RESOURCE: 1})}"),
        *(f"--labels={NAME_LABEL}={cluster.nodes[index].name}", *options),
    ]


def _runs_in_time(node: OwnDaemon) -> bool:
    """Waits until the node runs; False when it has ended, or was not there in time."""
    deadline = time.monotonic() + START_TIME_S
    while not _has_started(node):
        if node.identity() is None or time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _kill_session(leader: int) -> None:
    """Ends the processes that a failed start has left, so that they don't disturb the next attempt."""
    deadline = time.monotonic() + STOP_TIME_S
    while (left := _alive(session_members(leader))) and time.monotonic() < deadline:
        for process in left:
            process.send(signal.SIGKILL)
        time.sleep(POLL_S)


def _processes_with(setting: str) -> set[ProcessIdentity]:
    """Returns the processes that have this in their environment."""
    found: set[ProcessIdentity] = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            settings = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        pid = int(path.parent.name)
        if setting.encode() in settings and (identity := identity_of(pid)) is not None:
            found.add(identity)
    return found


def _host(index: int) -> str:
    """Returns the address of a node; never 127.0.0.1, which Ray would replace by an address of the network."""
    return f"127.0.0.{index + 2}"


def _has_started(node: OwnDaemon) -> bool:
    return "Ray runtime started" in node.log_tail()


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind((_host(0), 0))
        return int(trial.getsockname()[1])
