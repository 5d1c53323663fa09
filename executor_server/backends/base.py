"""The seam between the daemon and whatever makes sandboxes.

A backend makes a sandbox from an approved spec, hands over a way to reach its guest, and destroys it. It knows nothing
of sessions, clients or policies. `tests/contract` states what every implementation promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from executor_server.model import SandboxSpec


@dataclass(frozen=True)
class GuestEndpoint:
    """Where the guest's supervisor listens and the secret that it knows the hash of."""

    socket_path: Path
    token: bytes


@dataclass(frozen=True)
class HostFinding:
    """One line of `check-host`: what is isolated or limited, how, and what to do when it is not."""

    subject: str  # "memory limit", "user namespace", ...
    ok: bool
    detail: str  # a sentence
    remedy: str = ""  # a sentence, when not ok
    required: bool = True  # the backend refuses to serve without it


class Sandbox(Protocol):
    """One isolated environment with a guest in it."""

    @property
    def sandbox_id(self) -> str: ...

    @property
    def endpoint(self) -> GuestEndpoint: ...

    async def oom_kills(self) -> int | None:
        """How many processes of this sandbox the kernel has killed for memory so far; None where nobody counts."""
        ...

    async def destroy(self) -> None:
        """Ends every process of the sandbox and removes all that it left on the host. Idempotent, bounded in time.

        Raises SandboxFailure when something is still there after all attempts.
        """
        ...


class Backend(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str: ...

    @property
    def images(self) -> Sequence[str]:
        """Names of the images it can make a sandbox of; the first is the default."""
        ...

    async def start(self) -> None:
        """Checks the host, and sweeps what an earlier daemon of this state directory left behind.

        Raises SandboxFailure, with what is missing and how to mend it, when a required feature is absent.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Makes a sandbox whose guest will accept a connection. Raises SandboxFailure; leaves nothing behind then."""
        ...

    async def check_host(self) -> Sequence[HostFinding]: ...

    async def close(self) -> None:
        """Destroys every sandbox that it made and still knows."""
        ...
