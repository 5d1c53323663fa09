"""A fleet on a local Ray, made and ended with the command line. All tests share one: it takes half a minute to start."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClient
from executor_server.fleet.ray.layout import FleetFiles
from executor_server.fleet.ray.local_cluster import LocalCluster, read_cluster
from tests.support.backends import require

NODES = 2
COMMAND_TIMEOUT_S = 230.0
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: tools/setup.sh ray")


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


def test_a_second_up_is_refused(fleet: Fleet) -> None:
    again = fleet.command("up")
    assert again.returncode == 1
    assert "already" in again.stderr
