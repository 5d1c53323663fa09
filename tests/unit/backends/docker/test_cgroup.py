"""A container's control group is found through its first process, and another process's group is not used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from executor_server.backends.control_groups import count_oom_kills, set_cpu_share
from executor_server.backends.docker.cgroup import cpu_group, memory_group

CONTAINER = "4f" * 32


def _host(directory: Path, version: int, group: str, oom_kills: int = 2) -> Path:
    """Makes a /proc of a host with that version, where process 77 is in the group, which counts so many deaths."""
    mount_point = directory / "sys"
    place = mount_point / group.lstrip("/")
    place.mkdir(parents=True)
    (place / ("memory.events" if version == 2 else "memory.oom_control")).write_text(f"oom_kill {oom_kills}\n")
    proc = directory / "proc"
    (proc / "77").mkdir(parents=True)
    (proc / "self").mkdir()
    lines = (
        f"0::{group}\n" if version == 2 else f"12:cpuset:/elsewhere\n4:memory:{group}\n1:name=systemd:{group}\n0::/\n"
    )
    (proc / "77" / "cgroup").write_text(lines)
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
    (proc / "self" / "mountinfo").write_text(
        f"1 0 8:1 / / rw - ext4 /dev/vda rw\n30 25 0:26 / {mount_point} rw,relatime - {kind} cgroup {options}\n"
    )
    return proc


@pytest.mark.parametrize(
    ("version", "group"),
    [(1, f"/docker/{CONTAINER}"), (2, f"/docker/{CONTAINER}"), (2, f"/system.slice/docker-{CONTAINER}.scope")],
)
def test_deaths_are_counted_in_both_versions(tmp_path: Path, version: int, group: str) -> None:
    counter = memory_group(77, CONTAINER, _host(tmp_path, version, group))
    assert counter is not None and count_oom_kills(*counter) == 2
    shutil.rmtree(counter.directory)
    assert count_oom_kills(*counter) is None


def test_the_group_of_another_service_is_not_used(tmp_path: Path) -> None:
    assert memory_group(77, CONTAINER, _host(tmp_path, 2, "/user.slice")) is None


def test_a_process_that_has_ended_has_no_group(tmp_path: Path) -> None:
    assert memory_group(78, CONTAINER, _host(tmp_path, 2, f"/docker/{CONTAINER}")) is None


@pytest.mark.parametrize("place", ["docker/{}", "system.slice/docker-{}.scope"])
@pytest.mark.parametrize(("version", "file", "weight"), [(1, "cpu.shares", "512"), (2, "cpu.weight", "50")])
def test_a_containers_share_of_the_processors_is_weighed_where_the_engine_keeps_it(
    tmp_path: Path, version: int, place: str, file: str, weight: str
) -> None:
    proc = _host(tmp_path, version, "/")
    mountinfo = proc / "self" / "mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace("rw,memory", "rw,cpu,cpuacct"))
    group = tmp_path / "sys" / place.format(CONTAINER)
    group.mkdir(parents=True)
    (group / file).write_text("")
    found = cpu_group(CONTAINER, proc)
    assert found is not None
    set_cpu_share(*found, 0.5)
    assert (group / file).read_text() == weight


def test_a_container_whose_group_is_elsewhere_is_not_weighed(tmp_path: Path) -> None:
    assert cpu_group(CONTAINER, _host(tmp_path, 2, "/elsewhere")) is None
