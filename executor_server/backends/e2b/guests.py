"""The guest in a machine of the cloud: brought there, walled in and started by root, before anything else runs in it.

A machine is one tenant's, and a wall to everybody else. Within it, `nest` (guest/nest.py) makes the walls that stand
between agent code and what the cloud itself runs in the machine.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import structlog

from executor_server.backends.e2b.failures import CommandFailed
from executor_server.backends.e2b.patience import patiently
from executor_server.backends.e2b.templates import PYTHON, Prepared
from executor_server.backends.environment import sandbox_environment
from executor_server.backends.seccomp_program import UnsupportedArchitecture, filter_program
from executor_server.errors import SandboxFailure
from executor_server.guest.tokens import LONG_CHAIN_LENGTH, chained
from executor_server.guest_archive import GuestArchive
from executor_server.model import SandboxSpec

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Machine

SANDBOX_UID = 65_533
"""User and group of the code inside: in no list of users, so nothing in the machine is theirs."""

_DIRECTORY = "/opt/executor"
_SOCKETS = "/run/executor"
_NEST_TIMEOUT_S = 60.0
# Of a machine's memory, what is left for the cloud's own programs and the supervisor.
_RESERVED = 8

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class GuestFile:
    """The archive as it is uploaded."""

    version: str
    data: bytes

    @classmethod
    def of(cls, archive: GuestArchive) -> GuestFile:
        return cls(archive.version, archive.path.read_bytes())


def relay_command(version: str, sandbox_id: str) -> str:
    """The command that leads to the guest, less its last argument."""
    return f"exec {PYTHON} -I -S {_guest_path(version)} relay {_socket_path(sandbox_id)}"


async def start_guest(
    machine: Machine,
    prepared: Prepared,
    *,
    guest: GuestFile,
    sandbox_id: str,
    token: bytes,
    spec: SandboxSpec,
    preload: Sequence[str],
) -> None:
    """It listens when this returns. Raises SandboxFailure; whoever made the machine then ends it."""
    path = _guest_path(guest.version)
    await patiently(lambda: machine.upload(path, guest.data))
    config = _config(prepared, sandbox_id=sandbox_id, token=token, spec=spec, preload=preload)
    command = f"exec {PYTHON} -I -S {path} nest {shlex.quote(json.dumps(config))}"
    try:
        # Repeated, it finds the guest that it has started.
        await patiently(lambda: machine.run(command, timeout_s=_NEST_TIMEOUT_S))
    except CommandFailed as failed:
        raise SandboxFailure(f"the guest does not start: {failed.said or f'exit code {failed.exit_code}'}") from failed


def _config(
    prepared: Prepared, *, sandbox_id: str, token: bytes, spec: SandboxSpec, preload: Sequence[str]
) -> dict[str, object]:
    memory_bytes = _memory_bytes(prepared, spec)
    try:
        seccomp = base64.b64encode(filter_program(prepared.machine)).decode("ascii")
    except UnsupportedArchitecture as error:
        raise SandboxFailure(f"the template's machines can't confine: {error}") from error
    return {
        "socket": _socket_path(sandbox_id),
        "uid": SANDBOX_UID,
        "gid": SANDBOX_UID,
        "environment": sandbox_environment(spec.processes),
        "processes": spec.processes,
        "disk_bytes": spec.disk_bytes,
        "max_files": spec.max_files,
        # Shared memory is memory: half of it at most, so that a full /dev/shm leaves room for a program.
        "shm_bytes": min(spec.disk_bytes, memory_bytes // 2),
        "seccomp": seccomp,
        "guest": {
            "token_hash": chained(token, LONG_CHAIN_LENGTH).hex(),
            "workspace": "/workspace",
            "orphan_time_s": spec.orphan_time_s,
            "memory_bytes": memory_bytes,
            "processes": spec.processes,
            "watch_memory": True,
            "preload": list(preload),
        },
    }


def _memory_bytes(prepared: Prepared, spec: SandboxSpec) -> int:
    """The limit; in a small machine less than was granted, or its kernel would choose what to kill, and not us."""
    usable = prepared.memory_bytes - prepared.memory_bytes // _RESERVED
    if usable < spec.memory_bytes:
        _tell_of_memory(spec.image, spec.memory_bytes, usable)
    return min(spec.memory_bytes, usable)


@lru_cache(maxsize=64)  # once for all sandboxes of a kind
def _tell_of_memory(image: str, granted_bytes: int, usable_bytes: int) -> None:
    _log.warning("template_has_less_memory", image=image, granted_bytes=granted_bytes, usable_bytes=usable_bytes)


def _guest_path(version: str) -> str:
    return f"{_DIRECTORY}/guest-{version}.pyz"


def _socket_path(sandbox_id: str) -> str:
    return f"{_SOCKETS}/{sandbox_id}/guest.sock"
