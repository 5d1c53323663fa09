"""The report of a sandbox that is about to serve is compared with what must be, in every field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.local.fork_server.fork import SandboxPlan
from executor_server.backends.local.fork_server.forked_process import ForkFailed
from executor_server.backends.local.fork_server.verification import fault_of
from executor_server.guest.wire.fork_server_messages import MAX_PLAN_FDS, PACKET_BYTES

NAMES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
FORK_SERVER = dict.fromkeys(NAMES, 1)


def plan(host_uid: int | None = 2_000_000_005, **changed: Any) -> SandboxPlan:
    values: dict[str, Any] = {
        "guest": {},
        "sizes": {"disk": 1, "shm": 1, "files": 1},
        "rlimits": {},
        "seccomp": b"12345678",
        "environment": {},
        "below_tmp": (),
        "listener": 7,
        "cpu_counter": 8,
        "groups": (),
    }
    return SandboxPlan(host_uid=host_uid, **{**values, **changed})


def report(host_uid: int = 2_000_000_005) -> dict[str, Any]:
    zero = "0" * 16
    return {
        "pid": 1,
        "status": {
            **dict.fromkeys(("Uid", "Gid"), "1000 1000 1000 1000"),
            **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), zero),
            "Groups": "",
            "NSpid": "1",
            "Threads": "1",
            "NoNewPrivs": "1",
            "Seccomp": "2",
        },
        "descriptors": [0, 1, 2, 3, 5, 6],
        "namespaces": dict.fromkeys(NAMES, 2),
        "uid_map": [[1000, host_uid, 1]],
        "gid_map": [[1000, host_uid, 1]],
        "writable": sorted(
            ["/dev/pts", "/dev/shm", "/proc", "/tmp", "/workspace"]
            + [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")]
        ),
    }


def test_a_sandbox_as_it_must_be_has_no_fault() -> None:
    assert fault_of(report(), plan(), FORK_SERVER) == ""
    assert fault_of(report(0), plan(None), FORK_SERVER) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Uid", "0 0 0 0"),
        ("Uid", "1000 1000 0 1000"),
        ("Gid", "0 1000 1000 1000"),
        ("Groups", "0"),
        ("NSpid", "17 1"),
        ("Threads", "2"),
        ("NoNewPrivs", "0"),
        ("Seccomp", "0"),
        ("CapEff", "0000000000200000"),
        ("CapBnd", "00000000000000c0"),
        ("CapAmb", ""),
        ("CapInh", None),
    ],
)
def test_a_right_that_is_left_is_a_fault(field: str, value: str | None) -> None:
    said = report()
    said["status"][field] = value
    assert field in fault_of(said, plan(), FORK_SERVER) or "groups" in fault_of(said, plan(), FORK_SERVER)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", 2),
        ("descriptors", [0, 1, 2, 3, 5, 6, 7]),
        ("descriptors", [0, 1, 2, 3, 5]),
        ("descriptors", None),
        ("uid_map", [[0, 0, 1], [1000, 2_000_000_005, 1]]),
        ("gid_map", [[1000, 0, 1]]),
        ("uid_map", [[1000, 2_000_000_006, 1]]),
        ("writable", ["/", "/dev/pts"]),
        ("writable", None),
        ("status", None),
        ("namespaces", []),
    ],
)
def test_anything_else_that_differs_is_a_fault(field: str, value: object) -> None:
    assert fault_of({**report(), field: value}, plan(), FORK_SERVER) != ""


@pytest.mark.parametrize("name", NAMES)
def test_a_namespace_that_is_not_its_own_is_a_fault(name: str) -> None:
    own = Path("/proc/self/ns", name).stat().st_ino
    for inode in (FORK_SERVER[name], own, None):
        said = report()
        said["namespaces"][name] = inode
        assert name in fault_of(said, plan(), FORK_SERVER)


def test_an_empty_report_is_a_fault() -> None:
    assert fault_of({}, plan(), FORK_SERVER) != ""


def test_a_plan_that_is_too_large_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ForkFailed, match="bytes"):
        plan(environment={"X": "x" * PACKET_BYTES}).packed(9)
    with pytest.raises(ForkFailed, match="descriptors"):
        plan(groups=range(MAX_PLAN_FDS)).packed(9)
