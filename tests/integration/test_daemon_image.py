"""The daemon in a container: compose.yaml is enough for an agent beside it, and gives the container nothing more."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.backends import require
from tests.support.engine import engine_client
from tests.support.polling import eventually

COMPOSE = Path(__file__).resolve().parents[2] / "compose.yaml"
TIMEOUT_S = 90.0


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["docker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    require("docker")
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    with engine_client() as client:
        missing = [each["image"] for each in services.values() if not client.images(each["image"])]
    if missing and "docker" in os.environ.get("REQUIRED_BACKENDS", "").split(","):
        pytest.fail(f"there is no image {missing[0]}, and it is required", pytrace=False)
    if missing:
        pytest.skip(f"there is no image {missing[0]}; `make images IMAGES='daemon demo'` builds it")
    return services


def options(service: dict[str, Any], volume: str) -> list[str]:
    """Return the options of `docker run` for a service, as compose gives them to the Engine."""
    given = [option for name in service.get("cap_drop", ()) for option in ("--cap-drop", name)]
    given += [option for name in service.get("security_opt", ()) for option in ("--security-opt", name)]
    (mount,) = service["volumes"]
    # The Engine of a test host may have no bridge to give.
    return [*given, "--network", "none", "--volume", mount.replace("state:", f"{volume}:", 1)]


@pytest.fixture(scope="module")
def daemon(services: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of a daemon's container and of its volume."""
    name = f"executor-test-{secrets.token_hex(4)}"
    docker("volume", "create", name)
    try:
        begun = docker(
            "run", "--detach", "--name", name, *options(services["daemon"], name), services["daemon"]["image"]
        )
        assert begun.returncode == 0, begun.stderr
        try:
            check = services["daemon"]["healthcheck"]["test"][1:]
            assert eventually(lambda: docker("exec", name, *check).returncode == 0, timeout_s=TIMEOUT_S)
            yield name, name
        finally:
            docker("rm", "--force", name)
    finally:
        docker("volume", "rm", name)


def test_an_agent_beside_it_gets_its_answer(services: dict[str, Any], daemon: tuple[str, str]) -> None:
    demo = docker("run", "--rm", *options(services["demo"], daemon[1]), services["demo"]["image"])
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "The agent's answer: The two regions sold for 317,550 CHF." in demo.stdout


def test_its_container_has_no_capability_and_an_ordinary_user(daemon: tuple[str, str]) -> None:
    status = docker("exec", daemon[0], "cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert fields["Uid"].split() == ["1000"] * 4


def test_a_sandbox_sees_neither_the_daemon_nor_its_state(daemon: tuple[str, str]) -> None:
    program = "import json, os\nprint(json.dumps([os.path.exists(p) for p in ('/opt/remote-executor', '/state', '/usr/bin/env')]))"
    done = docker("exec", daemon[0], "executor", "run", "--imports", "os,json", "-c", program)
    assert json.loads(done.stdout) == [False, False, True], done.stderr


def test_it_stops_when_it_is_told_to(services: dict[str, Any]) -> None:
    name = f"executor-test-{secrets.token_hex(4)}"
    docker("run", "--detach", "--name", name, *options(services["daemon"], name), services["daemon"]["image"])
    try:
        assert eventually(lambda: docker("exec", name, "executor", "ps").returncode == 0, timeout_s=TIMEOUT_S)
        docker("stop", "--time", "60", name)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip() == "0"
    finally:
        docker("rm", "--force", name)
        docker("volume", "rm", name)
