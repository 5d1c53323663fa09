"""A front and two nodes in containers of the daemon's image: certificates, a DNS name, and the front as proxy."""

from __future__ import annotations

import io
import json
import os
import secrets
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from executor_server.fleet.membership import issue_front, issue_node
from tests.support.backends import require
from tests.support.engine import engine_client
from tests.support.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
NODES = ("a", "b")
TIMEOUT_S = 90.0
USER = 1000
# The configurations of the manifest, with names of this network, and without TLS: clients are in the containers.
MANIFEST = ROOT / "examples/kubernetes/statefulset.yaml"
NAMES = {
    "executor-nodes.remote-executor.svc.cluster.local": "nodes",
    'listen = ["0.0.0.0:50051"]\n': "",
    'tls_cert = "/tls/tls.crt"\n': "",
    'tls_key = "/tls/tls.key"\n': "",
    '"/certificates"': '"/state/certificates"',
}
FLEET = """
import json
from executor_server.api import AdminEndpoint, admin_client
endpoint = AdminEndpoint("unix:/state/executor.sock", open("/state/token").read().strip())
with admin_client(endpoint) as client:
    print(json.dumps(client.fleet()))
"""


def docker(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass(frozen=True)
class Containers:
    """The containers of a fleet have the prefix of its name; so have their volumes."""

    name: str
    image: str
    options: tuple[str, ...]

    def volume(self, member: str, files: dict[str, bytes]) -> str:
        """Makes the state directory of a member, with files that belong to the container's user."""
        volume = f"{self.name}-{member}"
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for directory in ("certificates",):
                entry = tarfile.TarInfo(directory)
                entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, 0o700, USER, USER
                archive.addfile(entry)
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode, entry.uid, entry.gid = len(data), 0o600, USER, USER
                archive.addfile(entry, io.BytesIO(data))
        unpack = ("--user", "0", "--network", "none", "--volume", f"{volume}:/state", self.image)
        done = docker("run", "--rm", "-i", *unpack, "tar", "-x", "-C", "/state", stdin=packed.getvalue())
        assert done.returncode == 0, done.stderr
        return volume

    def start(self, member: str, volume: str, *command: str, alias: str) -> None:
        name = f"{self.name}-{member}"
        network = ("--network", self.name, "--network-alias", alias)
        begun = docker(
            "run", "--detach", "--name", name, *network, *self.options, "-v", f"{volume}:/state", self.image, *command
        )
        assert begun.returncode == 0, begun.stderr

    def run(self, member: str, *command: str) -> subprocess.CompletedProcess[str]:
        return docker("exec", f"{self.name}-{member}", *command)

    def states(self) -> dict[str, str]:
        """Returns the state of each node, as the front sees it; empty while it does not answer."""
        asked = docker("exec", "--env", "PYTHONPATH=/opt/remote-executor", f"{self.name}-front", "python3", "-c", FLEET)
        if asked.returncode != 0:
            return {}
        return {node["node"]: node["state"].removeprefix("NODE_STATE_") for node in json.loads(asked.stdout)["nodes"]}

    def logs(self) -> str:
        return "\n".join(docker("logs", f"{self.name}-{member}").stderr[-3000:] for member in ("front", *NODES))


def _image() -> tuple[str, tuple[str, ...]]:
    """Returns the daemon's image and what compose.yaml grants it; skips where it is not there, or too old."""
    require("docker")
    service: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["daemon"]
    image = str(service["image"])
    is_required = "docker" in os.environ.get("REQUIRED_BACKENDS", "").split(",")
    with engine_client() as client:
        found = client.images(image)
    has_front = found and docker("run", "--rm", "--network", "none", image, "executor-server", "front", "--help")
    if not has_front or has_front.returncode != 0:
        text = f"there is no image {image} with a front; `make images IMAGES=daemon` builds it"
        pytest.fail(text, pytrace=False) if is_required else pytest.skip(text)
    options = [option for name in service["cap_drop"] for option in ("--cap-drop", name)]
    options += [option for name in service["security_opt"] for option in ("--security-opt", name)]
    return image, tuple(options)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    image, options = _image()
    containers = Containers(f"executor-test-{secrets.token_hex(4)}", image, options)
    if docker("network", "create", "--internal", containers.name).returncode != 0:
        pytest.skip("this Engine has no bridge to give")
    try:
        _start(containers, tmp_path_factory.mktemp("authority"))
        yield containers
    finally:
        members = [f"{containers.name}-{member}" for member in ("front", *NODES)]
        docker("rm", "--force", *members)
        docker("volume", "rm", "--force", *members)
        docker("network", "rm", containers.name)


def _start(containers: Containers, authority: Path) -> None:
    documents = yaml.safe_load_all(MANIFEST.read_text())
    configs: dict[str, str] = next(each for each in documents if each["kind"] == "ConfigMap")["data"]
    for old, new in NAMES.items():
        configs = {name: text.replace(old, new) for name, text in configs.items()}
    folders = {"front": issue_front(authority).folder} | {node: issue_node(authority, node).folder for node in NODES}
    for member, folder in folders.items():
        kind = "front" if member == "front" else "node"
        files = {f"certificates/{path.name}": path.read_bytes() for path in folder.iterdir()}
        volume = containers.volume(member, {**files, f"{kind}.toml": configs[f"{kind}.toml"].encode()})
        command = "front" if member == "front" else "serve"
        alias = "front" if member == "front" else "nodes"
        containers.start(member, volume, "executor-server", command, "--config", f"/state/{kind}.toml", alias=alias)
    serving = dict.fromkeys(NODES, "SERVING")
    assert eventually(lambda: containers.states() == serving, timeout_s=TIMEOUT_S), containers.logs()


def test_a_session_in_containers_is_made_and_used_through_the_front(fleet: Containers) -> None:
    done = fleet.run("front", "executor", "run", "-c", "print(6 * 7)")
    assert done.stdout.strip() == "42", done.stderr + fleet.logs()


def test_when_a_container_is_killed_the_front_declares_its_node_lost_and_uses_the_other(fleet: Containers) -> None:
    docker("kill", f"{fleet.name}-a")
    assert eventually(lambda: fleet.states().get("a") == "LOST"), fleet.states()
    done = fleet.run("front", "executor", "run", "-c", "print(6 * 7)")
    assert done.stdout.strip() == "42", done.stderr + fleet.logs()
