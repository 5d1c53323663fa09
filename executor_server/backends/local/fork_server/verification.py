"""Checks a sandbox that is about to serve: every wall is up, or it never runs anything.

Everything is checked twice. The sandbox's own report (guest/fork_server/report.py) finds our faults: a kernel that
ignores a flag, a step that was moved, a descriptor that a library opened. It is as trustworthy as its process, which
has imported the image's libraries. So the daemon also reads the process's state from the kernel. It may read all of it.
The process is non-dumpable, which closes its namespaces and descriptors to its own user; they are open to root, and to
the ordinary user who made the fork server, because the owner of a user namespace has every right in it and below. A
security module of the host can still refuse these two; then only the report covers them. Everything that confines agent
code (filter, rights, users and mounts) is in files that every process may read.

No check makes a hostile library harmless: it has run in the template process, with the fork server's rights, and may
have put any other process in its place; a loaded filter may refuse nothing. The libraries are trusted code of every
sandbox of their fork server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor_server.backends.local.layout import SANDBOX_ID
from executor_server.guest.wire.fork_server_messages import CAPABILITIES, NAMESPACES, STATUS_FIELDS

if TYPE_CHECKING:
    from executor_server.backends.local.fork_server.fork import SandboxPlan

_WALLS = {"NSpid": "1", "Threads": "1", "NoNewPrivs": "1", "Seccomp": "2"}
_MAPS = ("uid_map", "gid_map")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_WRITABLE = sorted(["/dev/pts", "/dev/shm", "/proc", "/tmp", "/workspace", *(f"/dev/{name}" for name in _DEVICES)])
# Bytes of the largest file of /proc that is read: a table of some hundred mounts.
_PROC_BYTES = 256 * 1024


def fault_of(report: Mapping[str, object], plan: SandboxPlan, fork_server: Mapping[str, int]) -> str:
    """Returns the fault in a few words; empty if there is none. `fork_server` holds that one's namespaces."""
    outside = 0 if plan.host_uid is None else plan.host_uid  # as the fork server numbers it
    return _fault(report, plan, fork_server, ids=(SANDBOX_ID, SANDBOX_ID), outside=(outside, outside))


def fault_of_process(pid: int, report: Mapping[str, object], plan: SandboxPlan, fork_server: Mapping[str, int]) -> str:
    """Returns the fault by the kernel's facts, and by the report where the kernel gives none."""
    own = (os.geteuid(), os.getegid()) if plan.host_uid is None else (plan.host_uid, plan.host_uid)
    try:
        facts = {**report, **_observed(pid)}
    except (OSError, ValueError, KeyError) as error:
        return f"the kernel does not say what it is: {error}"
    return _fault(facts, plan, fork_server, ids=own, outside=own)


def _fault(
    facts: Mapping[str, object],
    plan: SandboxPlan,
    fork_server: Mapping[str, int],
    *,
    ids: tuple[int, int],
    outside: tuple[int, int],
) -> str:
    """Compares facts. The user and group must be `ids`, and the maps must lead to `outside`."""
    status, namespaces = facts.get("status"), facts.get("namespaces")
    if not isinstance(status, dict) or not isinstance(namespaces, dict):
        return "it reports nothing"
    users = {name: " ".join([str(number)] * 4) for name, number in zip(("Uid", "Gid"), ids, strict=True)}
    for name, expected in {**users, **_WALLS}.items():
        if status.get(name) != expected:
            return f"{name} is {status.get(name)!r}"
    for name in CAPABILITIES:
        if not _is_zero(status.get(name)):
            return f"{name} is {status.get(name)!r}"
    if plan.host_uid is not None and status.get("Groups") != "":
        return f"it has the groups {status.get('Groups')!r}"
    for name, number in zip(_MAPS, outside, strict=True):
        if facts.get(name) != [[SANDBOX_ID, number, 1]]:
            return f"its {name} is {facts.get(name)!r}"
    for name, daemons in _daemon_namespaces().items():
        if namespaces.get(name) in (None, fork_server.get(name), daemons):
            return f"its namespace {name} is not its own"
    descriptors = facts.get("descriptors")
    if not isinstance(descriptors, list) or len(descriptors) != plan.kept_descriptors:
        return f"its descriptors are {descriptors!r}"
    if facts.get("pid") != 1:
        return f"its process id is {facts.get('pid')!r}"
    if facts.get("writable") != _WRITABLE:
        return f"it can write to the mounts {facts.get('writable')!r}"
    return ""


def _observed(pid: int) -> dict[str, Any]:
    """Returns the kernel's facts about a process, in the form of a report. Raises OSError, ValueError and KeyError."""
    lines = dict(line.split(":\t", 1) for line in _read(pid, "status").splitlines() if ":\t" in line)
    status = {name: " ".join(lines[name].split()) for name in STATUS_FIELDS if name in lines}
    status["NSpid"] = status["NSpid"].rpartition(" ")[2]  # from the outermost namespace that we see to its own
    mounts = [line.split(" ", 6)[4:6] for line in _read(pid, "mountinfo").splitlines()]
    seen: dict[str, Any] = {
        "pid": int(status["NSpid"]),
        "status": status,
        "writable": sorted(place for place, options in mounts if not options.startswith("ro")),
        **{name: [[int(text) for text in line.split()] for line in _read(pid, name).splitlines()] for name in _MAPS},
    }
    try:
        seen["descriptors"] = sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - names only
        seen["namespaces"] = _namespaces_of(pid)
    except PermissionError:
        pass  # a security module of the host; see above
    return seen


def _namespaces_of(pid: int) -> dict[str, int]:
    return {name: Path(f"/proc/{pid}/ns", name).stat().st_ino for name in NAMESPACES}


@cache
def _daemon_namespaces() -> dict[str, int]:
    return _namespaces_of(os.getpid())


def _read(pid: int, name: str) -> str:
    with Path(f"/proc/{pid}", name).open("rb", buffering=0) as file:
        data = b""
        while chunk := file.read(_PROC_BYTES):
            data += chunk
            if len(data) > _PROC_BYTES:
                raise ValueError(f"{name} has more than {_PROC_BYTES} bytes")
    return data.decode("utf-8", "surrogateescape")


def _is_zero(value: object) -> bool:
    return isinstance(value, str) and value != "" and set(value) == {"0"}
