"""A container's control group is found through its first process, and not believed if it is another's."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_server.backends.docker.cgroup import oom_counter

CONTAINER = "4f" * 32


def _host(directory: Path, version: int, group: str, oom_kills: int = 2) -> Path:
    """A /proc of a host with that version, where process 77 is in the group; the group counts that many deaths."""
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
    counter = oom_counter(77, CONTAINER, _host(tmp_path, version, group))
    assert counter is not None and counter.read() == 2
    counter.path.unlink()
    assert counter.read() is None


def test_the_group_of_somebody_else_is_not_taken_for_it(tmp_path: Path) -> None:
    assert oom_counter(77, CONTAINER, _host(tmp_path, 2, "/user.slice")) is None


def test_a_process_that_has_ended_has_none(tmp_path: Path) -> None:
    assert oom_counter(78, CONTAINER, _host(tmp_path, 2, f"/docker/{CONTAINER}")) is None
