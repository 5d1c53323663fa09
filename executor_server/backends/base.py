"""The seam between the daemon and whatever makes sandboxes.

A backend makes a sandbox from an approved spec, hands over a way to reach its guest, and destroys it. It knows nothing
of sessions, clients or policies. `tests/contract` states what every implementation promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from executor_server.guest.tokens import CHAIN_LENGTH
from executor_server.model import SandboxSpec

_CONNECT_STEP_S = 0.005


class GuestEndpoint(Protocol):
    """A way to the guest's supervisor, and the secret that it knows the hash of."""

    @property
    def token(self) -> bytes: ...

    @property
    def reconnect_s(self) -> float:
        """For how long the guest of a way that broke may be tried again, before it counts as gone."""
        ...

    @property
    def breaks_by_itself(self) -> bool:
        """Whether the way may break, or fall silent, though the guest is well: there is a network in between."""
        ...

    @property
    def reconnects_max(self) -> int:
        """How often this way may break before it is the guest who breaks it: in a session's life, or within an hour
        where it `breaks_by_itself`."""
        ...

    @property
    def connections_max(self) -> int:
        """How often the guest can be connected to: how many times its token was hashed for it."""
        ...

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Connects: calls `make_protocol`, and the protocol's `connection_made` with a transport, before it returns.

        Waits for a guest that does not listen yet, until it is cancelled. Raises OSError or SandboxFailure.
        """
        ...


@dataclass(frozen=True)
class SocketEndpoint:
    """A guest on this host, which listens at a Unix socket: it is there or dead. Implements `GuestEndpoint`."""

    socket_path: Path
    token: bytes
    reconnect_s: ClassVar[float] = 2.0
    # Such a channel does not break by itself, so a guest that goes on hanging up plays with us.
    breaks_by_itself: ClassVar[bool] = False
    reconnects_max: ClassVar[int] = 8
    connections_max: ClassVar[int] = CHAIN_LENGTH

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Where the guest itself makes the socket, it may not be there at once."""
        while True:
            try:
                await asyncio.get_running_loop().create_unix_connection(make_protocol, str(self.socket_path))
                return
            except FileNotFoundError:
                await asyncio.sleep(_CONNECT_STEP_S)


@dataclass(frozen=True)
class KnownSandbox:
    """A sandbox that an earlier daemon of the same state directory made, as the registry knows it."""

    sandbox_id: str
    spec: SandboxSpec
    token: bytes
    backend: str  # that made it


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
        """Of the backend that made it."""
        ...

    @property
    def endpoint(self) -> GuestEndpoint: ...

    @property
    def fingerprint(self) -> str:
        """What it was made of; see `Backend.fingerprint`."""
        ...

    async def oom_kills(self) -> int | None:
        """How many processes of this sandbox the kernel has killed for memory so far; None where nobody counts."""
        ...

    async def cause_of_death(self) -> str | None:
        """Why it ended, in a clause for its owner ("its container was removed"); None when that is not known.

        Bounded in time. Holds no path of the host and no text from inside.
        """
        ...

    async def label(self, session_id: str) -> None:
        """Shows on the host whose it is now. Best effort: it raises nothing, and nothing depends on it."""
        ...

    def set_cpu_share(self, share: float) -> None:
        """Where processors are scarce: it gets this part, up to 1, of what a sandbox gets. Best effort, as `label`."""
        ...

    @property
    def pause_idle_s(self) -> float | None:
        """After how long without use it is to be paused; None where that is not possible, or not wanted."""
        ...

    async def pause(self) -> bool:
        """Stops it as it is, with all that is in its memory, until `wake`; its guest's channel must be closed by now.

        False when it goes on running. Raises SandboxFailure when nobody knows.
        """
        ...

    async def wake(self) -> None:
        """Lets it go on after `pause`. Harmless when it runs. Raises SandboxFailure when it can't be woken."""
        ...

    async def destroy(self) -> None:
        """Ends every process of the sandbox and removes all that it left on the host. Idempotent, bounded in time.

        Raises SandboxFailure when something is still there after all attempts.
        """
        ...


class Backend(Protocol):
    """Makes sandboxes."""

    @property
    def name(self) -> str:
        """Of several that act as one it is all their names, with commas between."""
        ...

    async def start(self) -> None:
        """Checks the host and takes possession of the state directory.

        Raises SandboxFailure, with what is missing and how to mend it, when a required feature is absent.
        """
        ...

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        """Takes over what an earlier daemon of this state directory left: once, after `start`, before `create`.

        Those of `known` that still live come back, by their ids, as if they had been made here; every other sandbox
        of the state directory is destroyed. One that does not may be there as GoneSandbox, to say why. Raises
        SandboxFailure when something can be neither.
        """
        ...

    async def sweep(self) -> int:
        """Destroys what bears this state directory's mark and belongs to no sandbox that is known here.

        To be called now and then. Says how many there were; raises SandboxFailure when the host can't be asked.
        """
        ...

    async def fingerprint(self, spec: SandboxSpec) -> str:
        """Names all that a sandbox made now would be made of: the spec, the image's content, the guest.

        A kept sandbox with another one is out of date. May be a few seconds old. Raises SandboxFailure.
        """
        ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Makes a sandbox whose guest will accept a connection. Raises SandboxFailure; leaves nothing behind then.

        ImageNotReady, a SandboxFailure whose text may go to the client, when the image has to be provided first.
        """
        ...

    async def check_host(self) -> Sequence[HostFinding]: ...

    async def close(self) -> None:
        """Destroys every sandbox that it made and still knows. Raises SandboxFailure when some are left over."""
        ...
