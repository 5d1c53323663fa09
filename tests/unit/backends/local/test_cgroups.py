"""Groups are made where the kernel allows it, with the right limits; on directories that look like the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor_server.backends.local.cgroups import Cgroup, CgroupTrees, NoCgroups, discover_cgroups
from executor_server.core.errors import SandboxFailure

ELSEWHERE = "1"  # a process that is not ours


class Host:
    """A host's control groups, as the kernel shows them, in plain files."""

    def __init__(self, directory: Path) -> None:
        self.top = directory / "cgroup"
        self.mounts = directory / "mountinfo"
        self.own = directory / "own"
        self.mounts.write_text("")
        self.own.write_text("")

    def mount(self, kind: str, place: str, options: str, root: str = "/") -> Path:
        mount_point = self.top / place if place else self.top
        mount_point.mkdir(parents=True, exist_ok=True)
        with self.mounts.open("a") as file:
            file.write(f"30 23 0:26 {root} {mount_point} rw,nosuid - {kind} none rw,{options}\n")
        return mount_point

    def member_of(self, line: str) -> None:
        with self.own.open("a") as file:
            file.write(line + "\n")

    def group(self, path: Path, *, enabled: str = "", processes: str = "", available: str = "cpu memory pids") -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "cgroup.subtree_control").write_text(enabled)
        (path / "cgroup.controllers").write_text(available)
        (path / "cgroup.procs").write_text(processes)
        return path

    def discover(self) -> CgroupTrees | NoCgroups:
        return discover_cgroups(self.mounts, self.own)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_version_1_has_a_directory_for_each_kind_of_limit(host: Host) -> None:
    memory, pids = host.mount("cgroup", "memory", "memory"), host.mount("cgroup", "pids", "pids")
    (memory / "user").mkdir()
    host.member_of("4:memory:/user")
    host.member_of("3:pids:/")
    assert host.discover() == CgroupTrees(1, {"memory": memory / "user", "pids": pids})


def test_in_a_container_the_mount_shows_only_our_part_of_the_hierarchy(host: Host) -> None:
    memory = host.mount("cgroup", "memory", "memory", root="/docker/abc")
    host.member_of("4:memory:/docker/abc")
    assert host.discover() == CgroupTrees(1, {"memory": memory})


def test_version_2_uses_our_own_group_when_that_limits_children(host: Host) -> None:
    top = host.mount("cgroup2", "", "nsdelegate")
    own = host.group(top / "daemon.service", enabled="cpu memory pids")
    host.member_of("0::/daemon.service")
    assert host.discover() == CgroupTrees(2, {"memory": own, "pids": own, "cpu": own})


def test_version_2_moves_the_daemon_down_when_it_is_alone(host: Host) -> None:
    top = host.group(host.mount("cgroup2", "", "nsdelegate"))
    own = host.group(top / "daemon.service", processes=f"{os.getpid()}\n")
    host.member_of("0::/daemon.service")
    host.discover()
    assert (own / "executor-daemon" / "cgroup.procs").read_text() == str(os.getpid())
    assert (own / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_version_2_leaves_other_processes_where_they_are_and_looks_further_up(host: Host) -> None:
    top = host.group(host.mount("cgroup2", "", "nsdelegate"), enabled="memory pids")
    own = host.group(top / "session.scope", processes=f"{os.getpid()}\n{ELSEWHERE}\n")
    host.member_of("0::/session.scope")
    assert host.discover() == CgroupTrees(2, {"memory": top, "pids": top})
    assert (own / "cgroup.subtree_control").read_text() == ""


def test_a_group_that_is_not_ours_to_use_is_reported_with_a_remedy(host: Host) -> None:
    top = host.group(host.mount("cgroup2", "", "nsdelegate"))
    host.group(top / "session.scope", processes=f"{os.getpid()}\n{ELSEWHERE}\n")
    host.member_of("0::/session.scope")
    found = host.discover()
    assert isinstance(found, NoCgroups)
    assert "session.scope" in found.reason and "Delegate=yes" in found.remedy


def test_a_host_without_control_groups_is_reported(host: Host) -> None:
    assert isinstance(host.discover(), NoCgroups)


def test_a_group_gets_its_limits_and_no_swap(tmp_path: Path) -> None:
    both = CgroupTrees(2, {"memory": tmp_path, "pids": tmp_path})
    group = both.create(both.name("d", "s"), memory_bytes=1000, processes=7)
    (directory,) = group.unique_directories
    assert directory == tmp_path / "executor-d-s"
    assert (directory / "memory.max").read_text() == "1000"
    assert (directory / "pids.max").read_text() == "8"  # and bubblewrap


def _quota(trees: CgroupTrees, cpus: float | None) -> dict[str, str]:
    """Makes a group and returns the files about processors in it, by name."""
    group = trees.create(trees.name("d", "s"), memory_bytes=1000, processes=7, cpus=cpus)
    files = {path for directory in group.unique_directories for path in directory.glob("cpu.*")}
    return {path.name: path.read_text() for path in files}


@pytest.mark.parametrize(
    ("version", "file", "share", "weight"),
    [
        (1, "cpu.shares", 1.0, "1024"),
        (1, "cpu.shares", 1 / 8, "128"),
        (1, "cpu.shares", 1e-9, "2"),
        (2, "cpu.weight", 1.0, "100"),
        (2, "cpu.weight", 1e-9, "1"),
    ],
)
def test_a_share_of_the_processors_is_that_part_of_the_kernels_own_weight(
    tmp_path: Path, version: int, file: str, share: float, weight: str
) -> None:
    group = Cgroup(version, {"cpu": tmp_path})
    (tmp_path / file).write_text("")
    group.set_cpu_share(share)
    assert (tmp_path / file).read_text() == weight


def test_weighing_a_missing_group_or_one_without_a_weight_changes_nothing(tmp_path: Path) -> None:
    Cgroup(1, {"cpu": tmp_path / "gone"}).set_cpu_share(0.5)
    Cgroup(2, {"cpu": tmp_path}).set_cpu_share(0.5)
    Cgroup(1, {"memory": tmp_path}).set_cpu_share(0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("version", "cpus", "written"),
    [
        (2, 1.5, {"cpu.max": "150000 100000"}),
        (2, 0.01, {"cpu.max": "1000 100000"}),
        (2, None, {}),
        (1, 1.5, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}),
        (1, None, {}),
    ],
)
def test_processors_are_a_quota_of_each_period(
    tmp_path: Path, version: int, cpus: float | None, written: dict[str, str]
) -> None:
    parents = dict.fromkeys(("memory", "pids", "cpu"), tmp_path)
    assert _quota(CgroupTrees(version, parents), cpus) == written


@pytest.mark.parametrize(("above", "quota"), [("-1", "400000"), ("50000", "200000")])
def test_version_1_asks_for_no_more_than_the_groups_above_have(tmp_path: Path, above: str, quota: str) -> None:
    """The kernel would refuse the group, and a daemon in a container of few processors could make no sandbox."""
    place = tmp_path / "docker" / "daemon"
    place.mkdir(parents=True)
    for directory, quota_us in ((place, "-1"), (place.parent, above)):
        (directory / "cpu.cfs_quota_us").write_text(quota_us)
        (directory / "cpu.cfs_period_us").write_text("25000")
    assert _quota(CgroupTrees(1, {"memory": place, "cpu": place}), 4.0)["cpu.cfs_quota_us"] == quota


@pytest.mark.parametrize("has_quotas", [True, False])
def test_where_processors_cannot_be_limited_a_group_is_made_without(tmp_path: Path, has_quotas: bool) -> None:
    parents = dict.fromkeys(("memory", "pids", *(() if has_quotas else ("cpu",))), tmp_path)
    trees = CgroupTrees(2, parents, has_quotas)
    assert not trees.limits_processors
    assert _quota(trees, 1.5) == {}


def test_a_group_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    trees = CgroupTrees(1, {"memory": tmp_path, "pids": tmp_path / "missing"})
    with pytest.raises(SandboxFailure, match="executor-d-s"):
        trees.create(trees.name("d", "s"), memory_bytes=1000, processes=7)
    assert list(tmp_path.iterdir()) == []


def test_leftovers_carry_the_daemon_s_id_and_belong_to_no_living_sandbox(tmp_path: Path) -> None:
    (tmp_path / "executor-mine-1").mkdir()
    (tmp_path / "executor-mine-2").mkdir()
    (tmp_path / "executor-other-1").mkdir()
    (group,) = CgroupTrees(2, {"memory": tmp_path, "pids": tmp_path}).leftovers("mine", {"2"})
    assert group.unique_directories == [tmp_path / "executor-mine-1"]


@pytest.mark.parametrize(
    ("version", "file", "text"),
    [
        (1, "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        (2, "memory.events", "low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"),
    ],
)
def test_kills_for_memory_are_counted(tmp_path: Path, version: int, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    assert Cgroup(version, {"memory": tmp_path}).oom_kills() == 3


def test_kills_are_not_counted_without_a_memory_group(tmp_path: Path) -> None:
    assert Cgroup(1, {"pids": tmp_path}).oom_kills() is None
    assert Cgroup(1, {"memory": tmp_path / "gone"}).oom_kills() is None
