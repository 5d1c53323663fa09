"""Checks the report of a sandbox that is about to serve: every wall is up, or it never runs anything.

The sandbox is trusted code until then (guest/nursery/report.py), so this guards against our own faults: a kernel that
ignores a flag, a step that was moved, a descriptor that a library opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from executor_server.backends.local.layout import SANDBOX_ID

if TYPE_CHECKING:
    from executor_server.backends.local.nursery.births import SandboxPlan

_USER = " ".join([str(SANDBOX_ID)] * 4)
_EXPECTED_STATUS = {
    "Uid": _USER,
    "Gid": _USER,
    "NSpid": "1",
    "Threads": "1",
    "NoNewPrivs": "1",
    "Seccomp": "2",
}
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_WRITABLE = sorted(["/dev/pts", "/dev/shm", "/proc", "/tmp", "/workspace", *(f"/dev/{name}" for name in _DEVICES)])


def fault_of(report: Mapping[str, object], plan: SandboxPlan, nursery: Mapping[str, int]) -> str:
    """Returns what is wrong in a few words; empty when all is as it must be. `nursery` has its namespaces."""
    status, namespaces = report.get("status"), report.get("namespaces")
    if not isinstance(status, dict) or not isinstance(namespaces, dict):
        return "it reports nothing"
    for name, expected in _EXPECTED_STATUS.items():
        if status.get(name) != expected:
            return f"{name} is {status.get(name)!r}"
    for name in _CAPABILITIES:
        if not _is_zero(status.get(name)):
            return f"{name} is {status.get(name)!r}"
    if plan.host_uid is not None and status.get("Groups") != "":
        return f"it has the groups {status.get('Groups')!r}"
    expected_users = [SANDBOX_ID, 0 if plan.host_uid is None else plan.host_uid, 1]
    for name in ("uid_map", "gid_map"):
        if report.get(name) != [expected_users]:
            return f"its {name} is {report.get(name)!r}"
    for name in _NAMESPACES:
        if namespaces.get(name) in (None, nursery.get(name), Path("/proc/self/ns", name).stat().st_ino):
            return f"its namespace {name} is not its own"
    descriptors = report.get("descriptors")
    if not isinstance(descriptors, list) or len(descriptors) != plan.kept_descriptors:
        return f"its descriptors are {descriptors!r}"
    if report.get("pid") != 1:
        return f"its process id is {report.get('pid')!r}"
    if report.get("writable") != _WRITABLE:
        return f"it can write to the mounts {report.get('writable')!r}"
    return ""


def _is_zero(value: object) -> bool:
    return isinstance(value, str) and value != "" and set(value) == {"0"}
