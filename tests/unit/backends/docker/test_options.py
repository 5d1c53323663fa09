"""The options of a container follow the spec that the policy approved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.docker.options import Bind, ContainerRequest, HostAbilities, container_config
from executor_server.core.model import SandboxSpec

MIB = 2**20
SPEC = SandboxSpec("base", memory_bytes=512 * MIB, processes=64, disk_bytes=32 * MIB, orphan_time_s=60.0, cpus=1.5)
HOST = HostAbilities("x86_64", processors=8, limits_memory=True, limits_processors=True, has_swappiness=True)
REQUEST = ContainerRequest(
    image_id="sha256:abc",
    image_volumes=(),
    command=("/usr/bin/python3", "-c", "1"),
    user=2_000_000_001,
    spec=SPEC,
    labels={"executor.daemon": "0011"},
    binds=(Bind(Path("/state/guest.pyz"), "/run/executor/guest.pyz", read_only=True),),
)


def _host_config(request: ContainerRequest = REQUEST, host: HostAbilities = HOST) -> dict[str, Any]:
    config: dict[str, Any] = container_config(request, host)["HostConfig"]
    return config


def test_a_limit_below_the_runtime_s_own_processes_is_enforced_for_the_user() -> None:
    config = _host_config(replace(REQUEST, spec=replace(SPEC, processes=4)))
    assert config["PidsLimit"] == 32
    assert {"Name": "nproc", "Soft": 4, "Hard": 4} in config["Ulimits"]


def test_no_more_processors_are_requested_than_the_host_has() -> None:
    config = _host_config(replace(REQUEST, spec=replace(SPEC, cpus=64.0)))
    assert config["NanoCpus"] == 8_000_000_000


@pytest.mark.parametrize("cpus", [None, 1.5])
def test_limits_that_the_engine_cannot_enforce_are_not_requested(cpus: float | None) -> None:
    config = _host_config(
        replace(REQUEST, spec=replace(SPEC, cpus=cpus)), replace(HOST, limits_processors=False, has_swappiness=False)
    )
    assert "NanoCpus" not in config and "MemorySwappiness" not in config


@pytest.mark.parametrize("volume", ["/data", "data", "//data/", "/x/../data"])
def test_a_volume_of_the_image_is_hidden(volume: str) -> None:
    tmpfs = _host_config(replace(REQUEST, image_volumes=(volume,)))["Tmpfs"]
    assert {"ro", "size=4k"} <= set(tmpfs["/data"].split(","))


@pytest.mark.parametrize("volume", ["/workspace", "/workspace/", "/tmp"])
def test_a_volume_of_the_image_never_replaces_a_mount_of_ours(volume: str) -> None:
    assert _host_config(replace(REQUEST, image_volumes=(volume,)))["Tmpfs"] == _host_config()["Tmpfs"]


def test_nothing_of_the_daemons_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("EXECUTOR_TOKEN", "secret")
    environment = dict(entry.split("=", 1) for entry in container_config(REQUEST, HOST)["Env"])
    assert environment["HOME"] == "/workspace"
    assert not {"HTTP_PROXY", "EXECUTOR_TOKEN", "PATH"} & set(environment)
