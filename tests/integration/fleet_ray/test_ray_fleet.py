"""A fleet on a local Ray, made and ended with the command line. All tests share one: it takes half a minute to start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_client import ExecutorClient
from executor_server.fleet.ray.layout import FleetFiles
from executor_server.fleet.ray.local_cluster import LocalCluster, read_cluster
from executor_server.fleet.ray.processes import read_pid_file
from tests.support.backends import require
from tests.support.polling import eventually

NODES = 2
COMMAND_TIMEOUT_S = 230.0
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: tools/setup.sh ray")

# Ends an actor as a crash would, and waits for the one that Ray starts in its place.
KILL_ACTOR = """
import sys, time, json
import ray
ray.init(sys.argv[1], namespace="remote-executor", log_to_driver=False, logging_level="ERROR")
actor = ray.get_actor(sys.argv[2])
before = ray.get(actor.status.remote())
ray.kill(actor, no_restart=False)
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        after = ray.get(actor.status.remote())
        if after["adopted"]:  # by the one before, it was started
            break
    except ray.exceptions.RayActorError:
        pass
    time.sleep(0.1)
print(json.dumps([before["pid"], after["pid"], after["adopted"]]))
"""


@dataclass(frozen=True)
class Fleet:
    files: FleetFiles

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "executor_server", "ray", *arguments, "--state-dir", str(self.files.root)]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)

    def status(self) -> dict[str, Any]:
        shown = self.command("status", "--json")
        assert shown.returncode == 0, shown.stderr
        status: dict[str, Any] = json.loads(shown.stdout)
        return status

    def cluster(self) -> LocalCluster:
        cluster = read_cluster(self.files.cluster)
        assert cluster is not None
        return cluster

    def daemon_pid(self, node: str) -> int:
        identity = self.files.node(node).daemon.identity()
        return identity.pid if identity is not None else 0

    def client(self) -> ExecutorClient:
        state_dir = self.files.front.daemon.state_dir
        return ExecutorClient(f"unix:{state_dir / 'executor.sock'}", token=(state_dir / "token").read_text().strip())

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()[-3000:]}" for path in sorted(self.files.root.rglob("*.log")))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    require("local")
    root = Path(tempfile.mkdtemp(prefix="r-"))
    config = root / "fleet.toml"
    config.write_text("[pool]\nsize = 0\n[sessions]\nmax_sessions = 4\n[log]\nlevel = 'info'\n")
    fleet = Fleet(FleetFiles(root))
    try:
        up = fleet.command("up", "--nodes", str(NODES), "--config", str(config))
        assert up.returncode == 0, up.stderr + fleet.logs()
        yield fleet
    finally:
        down = fleet.command("down")
        assert down.returncode == 0, down.stderr
        shutil.rmtree(root)


def test_a_session_of_a_fleet_on_ray_is_placed_on_each_of_its_nodes(fleet: Fleet) -> None:
    with fleet.client() as client:
        for number in range(1, NODES + 1):
            labels = {"remote-executor/node": f"local-{number}"}
            with client.create_session(node_labels=labels) as session:
                assert session.execute("6 * 7").output == 42
                assert session.info.node == f"local-{number}"


def test_the_status_names_each_node_and_the_front(fleet: Fleet) -> None:
    status = fleet.status()
    assert sorted(node["name"] for node in status["nodes"]) == ["local-1", "local-2"]
    assert {node["state"] for node in status["fleet"]["nodes"]} == {"NODE_STATE_SERVING"}
    assert status["requested_nodes"] == 0
    shown = fleet.command("status").stdout
    assert "local-1" in shown
    assert "serving" in shown


def test_a_second_up_is_refused(fleet: Fleet) -> None:
    again = fleet.command("up")
    assert again.returncode == 1
    assert "already" in again.stderr


def test_ray_knows_no_secret_of_the_fleet(fleet: Fleet) -> None:
    """All files of Ray are searched: its logs, and the store in which arguments of calls lie."""
    secrets = [path.read_bytes() for path in fleet.files.root.rglob("key.pem")]
    secrets += [(fleet.files.front.daemon.state_dir / "token").read_bytes().strip()]
    secrets += [(fleet.files.front.authority / "ca.key").read_bytes()]
    assert len(secrets) == NODES + 3
    lines = [line for secret in secrets for line in secret.splitlines() if len(line) > 40]
    for path in fleet.cluster().temporary.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [line for line in lines if line in content], path


def test_the_next_actor_of_a_node_adopts_its_daemon_and_a_session_notices_nothing(fleet: Fleet) -> None:
    cluster = fleet.cluster()
    with fleet.client() as client, client.create_session() as session:
        session.execute("x = 41")
        for actor in [f"executor-node:{node['ray_node']}" for node in fleet.status()["nodes"]] + ["executor-front"]:
            done = subprocess.run(
                [sys.executable, "-c", KILL_ACTOR, cluster.address, actor],
                env={**os.environ, **cluster.environment},
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            before, after, adopted = json.loads(done.stdout)
            assert (after, adopted) == (before, True)
        assert session.execute("x + 1").output == 42


def test_the_end_of_a_raylet_ends_no_session(fleet: Fleet) -> None:
    with (
        fleet.client() as client,
        client.create_session(node_labels={"remote-executor/node": "local-2"}) as session,
    ):
        session.execute("x = 41")
        before = fleet.daemon_pid("local-2")
        leader = read_pid_file(fleet.cluster().temporary / "local-2.pid")
        assert leader is not None
        for process in [*psutil.Process(leader.pid).children(recursive=True), psutil.Process(leader.pid)]:
            process.kill()
        assert eventually(lambda: not leader.is_alive)
        assert session.execute("x + 1").output == 42
        assert fleet.daemon_pid("local-2") == before
        assert eventually(lambda: [n for n in fleet.status()["nodes"] if n["name"] == "local-2" and not n["ray_node"]])
        assert session.execute("x + 2").output == 43


def test_the_end_of_rays_head_ends_no_session_and_down_needs_no_ray(fleet: Fleet) -> None:
    """The last of the file: nothing of Ray is left after it, and the fixture's `down` must do without."""
    with fleet.client() as client, client.create_session() as session:
        session.execute("x = 41")
        for process in fleet.cluster().processes():
            process.send(signal.SIGKILL)
        assert eventually(lambda: not fleet.cluster().processes())
        assert session.execute("x + 1").output == 42
        with client.create_session() as another:
            assert another.execute("1 + 1").output == 2
    shown = fleet.command("status")
    assert shown.returncode == 1
    assert "go on without it" in shown.stderr
