"""The contract between the daemon and the backends that make its sandboxes.

A backend makes a sandbox from an approved spec, returns the endpoint of its guest, and destroys it. It
knows nothing of sessions, clients or policies. `tests/contract` states the promises of every implementation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from executor_server.backends.channel import GuestEndpoint, SocketEndpoint
from executor_server.core import SandboxSpec

if TYPE_CHECKING:
    from executor_server.backends.environments import Environment


@dataclass(frozen=True)
class KnownSandbox:
    """A sandbox that an earlier daemon of the same state directory made, as the registry knows it."""

    sandbox_id: str
    spec: SandboxSpec
    token: bytes
    backend: str  # name of the backend that made it


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
    def backend_name(self) -> str:
        """Name of the backend that made it."""
        ...

    @property
    def endpoint(self) -> GuestEndpoint: ...

    @property
    def fingerprint(self) -> str:
        """Identifies its spec, image and guest; see `Backend.fingerprint`."""
        ...

    async def oom_kills(self) -> int | None:
        """Returns how many processes of this sandbox the kernel has killed for memory; None where it is not counted."""
        ...

    async def cause_of_death(self) -> str | None:
        """Explains its end in a clause for its owner ("its container was removed"); None when that is not known.

        Bounded in time. Holds no path of the host and no text from inside.
        """
        ...

    async def label(self, session_id: str) -> None:
        """Shows on the host which session has it now. Best effort: it raises nothing, and nothing depends on it."""
        ...

    def set_cpu_share(self, share: float) -> None:
        """Sets its part, up to 1, of a sandbox's full share of scarce processors. Best effort, as `label`."""
        ...

    @property
    def pause_idle_s(self) -> float | None:
        """Seconds without use after which it should be paused; None if that is impossible or unwanted."""
        ...

    async def pause(self) -> bool:
        """Stops it until `wake`, and keeps its memory; the channel to its guest must be closed already.

        Returns False if it is still running. Raises SandboxFailure if it is unknown whether it runs.
        """
        ...

    async def wake(self) -> None:
        """Continues it after `pause`. Harmless when it runs. Raises SandboxFailure when it can't be woken."""
        ...

    async def destroy(self) -> None:
        """Ends every process of the sandbox and removes everything that it left on the host.

        Idempotent, bounded in time. Raises SandboxFailure when something is still there after all attempts.
        """
        ...


class PassiveSandbox:
    """Default answers to optional requests; a backend overrides those that it supports."""

    @property
    def pause_idle_s(self) -> float | None:
        return None

    async def pause(self) -> bool:
        return False

    async def wake(self) -> None:
        return

    async def oom_kills(self) -> int | None:
        return None

    async def label(self, session_id: str) -> None:
        return

    def set_cpu_share(self, share: float) -> None:
        return


class MissingSandbox(PassiveSandbox):
    """Stands in for a sandbox that its session has lost; it has no guest.

    `reason` is a clause for its owner, as `cause_of_death` is; empty when it is not known.
    """

    fingerprint = ""

    def __init__(self, sandbox_id: str, backend_name: str = "", reason: str = "") -> None:
        self.sandbox_id = sandbox_id
        self.backend_name = backend_name
        self.reason = reason
        self.endpoint = SocketEndpoint(Path("/nonexistent"), b"")

    async def cause_of_death(self) -> str | None:
        return self.reason or None

    async def destroy(self) -> None:
        return


@runtime_checkable
class MachineSandbox(Protocol):
    """A sandbox on another machine, which can't hand out its listener."""

    async def open_egress(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Starts an egress proxy next to the sandbox, and opens a stream to it (guest/cloud/egress.py).

        Raises SandboxFailure.
        """
        ...

    async def allow_hosts(self, hosts: Sequence[str]) -> None:
        """Lets that machine reach these hosts (names, `*.` before a domain) and no others. Raises SandboxFailure."""
        ...


class Backend(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str:
        """Its name; backends that act as one have all their names, separated by commas."""
        ...

    async def start(self) -> None:
        """Checks the host and takes possession of the state directory.

        Raises SandboxFailure, with what is missing and how to mend it, when a required feature is absent.
        """
        ...

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        """Takes over what an earlier daemon of this state directory left: once, after `start`, before `create`.

        Returns those of `known` that still live, by id, as if they had been made here; every other sandbox of the
        state directory is destroyed. A dead one may be returned as MissingSandbox, with the reason. Raises
        SandboxFailure when something can be neither taken over nor destroyed.
        """
        ...

    async def sweep(self) -> int:
        """Destroys everything with the id of this state directory that belongs to no known sandbox.

        Called at intervals. Returns how many it found; raises SandboxFailure when the host can't be asked.
        """
        ...

    async def fingerprint(self, spec: SandboxSpec) -> str:
        """Identifies everything that a new sandbox would be made of: the spec, the image's content, the guest.

        A kept sandbox with another fingerprint is out of date. May be a few seconds old. Raises SandboxFailure.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Makes a sandbox whose guest will accept a connection. Raises SandboxFailure; leaves nothing behind then.

        ImageNotReady, a SandboxFailure whose text may go to the client, when the image has to be provided first.
        """
        ...

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        """Returns the environment that a sandbox of the spec would see, without making one; None without packages.

        Raises SandboxFailure as `create`: ImageNotReady while it is being made.
        """
        ...

    async def check_host(self) -> Sequence[HostFinding]: ...

    async def close(self) -> None:
        """Destroys every sandbox that it made and still knows. Raises SandboxFailure when some are left over."""
        ...
