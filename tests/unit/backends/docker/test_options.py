"""The options of a container follow the spec that the policy approved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.docker.options import Bind, ContainerRequest, HostAbilities, container_config
from executor_server.core.model import SandboxSpec
from executor_server.guest.wire import rlimits

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


def test_the_image_s_own_command_user_and_health_check_are_overridden() -> None:
    config = container_config(REQUEST, HOST)
    assert (config["Entrypoint"], config["Cmd"]) == (["/usr/bin/python3", "-c", "1"], [])
    assert (config["User"], config["WorkingDir"]) == ("2000000001:2000000001", "/workspace")
    assert (config["Healthcheck"], config["StopSignal"]) == ({"Test": ["NONE"]}, "SIGKILL")


def test_every_container_is_isolated() -> None:
    config = _host_config()
    assert (config["NetworkMode"], config["IpcMode"], config["CgroupnsMode"]) == ("none", "private", "private")
    assert (config["CapDrop"], config["Privileged"], config["ReadonlyRootfs"]) == (["ALL"], False, True)
    assert config["SecurityOpt"][0] == "no-new-privileges"
    assert json.loads(config["SecurityOpt"][1].removeprefix("seccomp="))["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {"/sys", "/proc/kcore", "/proc/keys"} <= set(config["MaskedPaths"])
    assert (config["LogConfig"], config["RestartPolicy"]) == ({"Type": "none"}, {"Name": "no"})


def test_the_limits_are_those_of_the_spec() -> None:
    config = _host_config()
    assert (config["Memory"], config["MemorySwap"], config["MemorySwappiness"]) == (512 * MIB, 512 * MIB, 0)
    assert (config["PidsLimit"], config["NanoCpus"], config["ShmSize"]) == (64, 1_500_000_000, 32 * MIB)
    limits = {limit["Name"]: limit["Soft"] for limit in config["Ulimits"]}
    assert limits == {"nproc": 64, "fsize": 32 * MIB, **rlimits.FIXED, "nofile": 8192}
    assert all(limit["Soft"] == limit["Hard"] for limit in config["Ulimits"])


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


def test_shared_memory_takes_half_of_the_memory_at_most() -> None:
    assert _host_config(replace(REQUEST, spec=replace(SPEC, disk_bytes=2**40)))["ShmSize"] == 256 * MIB


def test_writable_directories_are_memory_with_a_size() -> None:
    tmpfs = _host_config()["Tmpfs"]
    assert set(tmpfs) == {"/tmp", "/var/tmp", "/workspace"}
    for options in tmpfs.values():
        assert {"nosuid", "nodev", f"size={32 * MIB}", "uid=2000000001"} <= set(options.split(","))


@pytest.mark.parametrize("volume", ["/data", "data", "//data/", "/x/../data"])
def test_a_volume_of_the_image_is_hidden(volume: str) -> None:
    tmpfs = _host_config(replace(REQUEST, image_volumes=(volume,)))["Tmpfs"]
    assert {"ro", "size=4k"} <= set(tmpfs["/data"].split(","))


@pytest.mark.parametrize("volume", ["/workspace", "/workspace/", "/tmp"])
def test_a_volume_of_the_image_never_replaces_a_mount_of_ours(volume: str) -> None:
    assert _host_config(replace(REQUEST, image_volumes=(volume,)))["Tmpfs"] == _host_config()["Tmpfs"]


def test_binds_are_read_only_unless_requested_otherwise() -> None:
    mount, _terminals = _host_config()["Mounts"]
    assert (mount["Type"], mount["Source"], mount["ReadOnly"]) == ("bind", "/state/guest.pyz", True)


def test_nothing_of_the_daemons_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("EXECUTOR_TOKEN", "secret")
    environment = dict(entry.split("=", 1) for entry in container_config(REQUEST, HOST)["Env"])
    assert environment["HOME"] == "/workspace"
    assert not {"HTTP_PROXY", "EXECUTOR_TOKEN", "PATH"} & set(environment)


def test_the_runtime_is_the_engine_s_default_unless_configured() -> None:
    assert "Runtime" not in _host_config()
    assert _host_config(replace(REQUEST, runtime="crun"))["Runtime"] == "crun"
