"""The report of a sandbox on its own walls before it may serve, read back from the kernel.

The daemon decides (`backends/local/fork_server/verification.py`). It is the last thing that trusted code does in a
sandbox, after all walls are up: a step that did not do what it says would otherwise be found by an attacker.
"""

from __future__ import annotations

import os

from ..wire.fork_server_messages import NAMESPACES, STATUS_FIELDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def namespaces() -> dict[str, int]:
    """Returns the namespaces of this process, by their inodes."""
    return {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in NAMESPACES}


def report() -> dict[str, Any]:
    """Returns the process's rights, users, descriptors, namespaces and writable mounts."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        status = dict(line.split(b":\t", 1) for line in file.read().splitlines() if b":\t" in line)
    with open("/proc/self/mountinfo", "rb", buffering=0) as file:
        mounts = [line.split(b" ", 6)[4:6] for line in file.readall().splitlines()]
    return {
        "pid": os.getpid(),
        "status": {
            name: " ".join(status[name.encode()].decode().split()) for name in STATUS_FIELDS if name.encode() in status
        },
        "descriptors": _descriptors(),
        "namespaces": namespaces(),
        "uid_map": _map("uid_map"),
        "gid_map": _map("gid_map"),
        "writable": sorted(place.decode() for place, options in mounts if not options.startswith(b"ro")),
    }


def _map(name: str) -> list[list[int]]:
    with open(f"/proc/self/{name}", "rb", buffering=0) as file:
        return [[int(number) for number in line.split()] for line in file.read().splitlines()]


def _descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that the list was read from
        found.append(int(name))
    return sorted(found)
