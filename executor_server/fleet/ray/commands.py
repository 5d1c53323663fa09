"""The commands of `executor-server ray`: make a fleet on Ray, show it, and end it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from executor_server.fleet.ray.configs import check_config
from executor_server.fleet.ray.daemon import FleetError, OwnDaemon
from executor_server.fleet.ray.engine import Engine, EngineError, connected
from executor_server.fleet.ray.front_actor import FrontActor, FrontSettings
from executor_server.fleet.ray.layout import FRONT_ACTOR, RESOURCE, FleetFiles
from executor_server.fleet.ray.local_cluster import LocalCluster, read_cluster, start_cluster, stop_cluster

UP_TIME_S = 180.0
"""Seconds for all nodes to serve after Ray runs."""
POLL_S = 0.3
ENDING_AT_A_TIME = 16

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """A fleet to be made. `address` is that of a cluster; without one a cluster of `nodes` is made here."""

    files: FleetFiles
    config: str = ""
    address: str | None = None
    nodes: int = 1
    front_directory: Path | None = None
    """On storage that all machines share; then the front may run on any of them."""
    selector: Mapping[str, str] | None = None


def require_ray() -> None:
    """Raises FleetError where Ray is not installed."""
    # Not imported: Ray reads its variables at its import, and `connected` sets them.
    if find_spec("ray") is None:
        raise FleetError("Ray is not installed here: pip install 'remote-executor[server,ray]'")


def up(plan: Plan, say: Say) -> dict[str, Any]:
    """Makes the fleet and waits until its nodes serve; returns the front's status.

    If it has started a cluster and then fails, nothing of the cluster is left. Raises FleetError, ConfigError.
    """
    require_ray()
    check_config(plan.config)
    plan.files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _held(plan.files):
        if plan.address is not None:
            with _connected(plan.address, {}) as engine:
                return _up(engine, plan, None, say)
        if read_cluster(plan.files.cluster) is not None:
            raise FleetError(f"There is a fleet of {plan.files.root} already; `executor-server ray down` ends it.")
        try:
            say(f"Starting Ray with {plan.nodes} nodes on this machine.")
            cluster = start_cluster(plan.files.cluster, plan.nodes)
            with _connected(cluster.address, cluster.environment) as engine:
                return _up(engine, plan, plan.nodes, say)
        except BaseException:
            _end_here(plan.files)
            raise


def status(files: FleetFiles, address: str | None) -> dict[str, Any]:
    """Returns what the front's actor knows. Raises FleetError."""
    require_ray()
    if address is not None:
        with _connected(address, {}) as engine:
            return _status(engine)
    cluster = _cluster_of(files)
    if not cluster.has_head:
        raise FleetError(
            f"Ray's head of {files.root} has ended. The front and the nodes go on without it; "
            "`executor-server ray down` ends them."
        )
    with _connected(cluster.address, cluster.environment) as engine:
        return _status(engine)


def down(files: FleetFiles, address: str | None, say: Say) -> None:
    """Ends daemons, sessions and actors; and Ray, where it was started for this fleet alone. Raises FleetError."""
    with _held(files):
        if address is not None:
            require_ray()
            with _connected(address, {}) as engine:
                _end_actors(engine, say)
        for text in _end_here(files):
            say(text)


# ---------------------------------------------------------------------------------------------------------------------


def _up(engine: Engine, plan: Plan, expected: int | None, say: Say) -> dict[str, Any]:
    nodes = engine.nodes()
    if not nodes:
        raise FleetError(
            f"No node of Ray offers the resource {RESOURCE}, so none would get a daemon: start those that shall have "
            f"""one with `ray start ... --resources='{{"{RESOURCE}": 1}}'`."""
        )
    directory = plan.front_directory or plan.files.front.root
    settings = FrontSettings(str(plan.files.root), str(directory), plan.config, dict(plan.selector or {}))
    actor = engine.front_actor(engine.own_node(), FrontActor, settings, soft=plan.front_directory is not None)
    say("Waiting for the front and the nodes.")
    deadline = time.monotonic() + UP_TIME_S
    while True:
        found = dict(_asked(engine, actor, "status"))
        serving = [node for node in found["fleet"].get("nodes", ()) if node["state"] == "NODE_STATE_SERVING"]
        if found["pid"] and len(serving) >= (expected if expected is not None else max(1, len(found["nodes"]))):
            return found
        if time.monotonic() > deadline:
            raise FleetError(_why_not(found, len(serving)))
        time.sleep(POLL_S)


def _why_not(found: Mapping[str, Any], serving: int) -> str:
    problems = [f"the front: {found['problem']}"] if found["problem"] else []
    problems += [f"{node['name'] or node['ray_node']}: {node['problem']}" for node in found["nodes"] if node["problem"]]
    problems += [f"{node['node']}: {node['problem']}" for node in found["fleet"].get("nodes", ()) if node["problem"]]
    logs = f"Logs are in {found['directory']} and in the folders of the nodes."
    return "\n".join([f"After {UP_TIME_S:g} s {serving} nodes serve. {logs}", *problems])


def _end_actors(engine: Engine, say: Say) -> None:
    front = engine.find(FRONT_ACTOR)
    if front is not None:
        _asked(engine, front, "close")
    actors = [(name, actor) for name in engine.node_actors() if (actor := engine.find(name)) is not None]
    calls = [(name, actor, engine.call(actor, "stop")) for name, actor in actors]
    if front is not None:
        calls.append((FRONT_ACTOR, front, engine.call(front, "stop")))
    for name, actor, call in calls:
        try:
            if not engine.wait(call):
                say(f"{name}: its daemon had to be killed.")
        except EngineError as error:
            say(f"{name}: {error}")
        engine.end(actor)
    engine.request_nodes(0)


def _end_here(files: FleetFiles) -> list[str]:
    """Ends the fleet on this machine, without Ray's help: its head may be gone. Returns a sentence for each problem.

    Ray goes first, since the actors would start the daemons again.
    """
    stop_cluster(files.cluster)
    daemons = [files.front.daemon, *(files.node(name).daemon for name in files.nodes_here())]
    with ThreadPoolExecutor(ENDING_AT_A_TIME) as threads:
        ended = list(threads.map(OwnDaemon.stop, daemons))
    return [
        f"The daemon of {daemon.folder} did not end in time and was killed."
        for daemon, in_order in zip(daemons, ended, strict=True)
        if not in_order
    ]


def _status(engine: Engine) -> dict[str, Any]:
    actor = engine.find(FRONT_ACTOR)
    if actor is None:
        raise FleetError("There is no fleet on this cluster; `executor-server ray up` makes one.")
    return dict(_asked(engine, actor, "status"))


def _asked(engine: Engine, actor: Any, method: str) -> Any:
    return engine.wait(engine.call(actor, method))


def _cluster_of(files: FleetFiles) -> LocalCluster:
    cluster = read_cluster(files.cluster)
    if cluster is None:
        raise FleetError(f"There is no fleet of {files.root}; for one on a cluster, give --address.")
    return cluster


@contextmanager
def _connected(address: str, environment: Mapping[str, str]) -> Iterator[Engine]:
    if address.startswith("ray://"):
        raise FleetError("A fleet is made from a machine of the cluster: use --address auto there.")
    try:
        with connected(address, environment) as engine:
            yield engine
    except EngineError as error:
        raise FleetError(f"Ray: {error}") from error


@contextmanager
def _held(files: FleetFiles) -> Iterator[None]:
    """Lets one command at a time change a fleet."""
    files.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(files.root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise FleetError(f"Another `executor-server ray` is at work in {files.root}.") from error
    finally:
        os.close(descriptor)
