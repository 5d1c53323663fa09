"""The interfaces between the proxy and the processes that run it.

The daemon's egress process and the root part of a machine in the cloud each bring a resolver, a reporter and, where
secrets are set, a terminator of TLS.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Protocol, Sequence

from .host_names import Target

if TYPE_CHECKING:
    from .connection import Connection


class Unresolved(Exception):
    """A name has no addresses. The message is a clause: "does not exist", "has no addresses"."""


class Used(NamedTuple):
    """Bytes that a session has moved before: by an earlier process, or through an earlier listener."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class Limits:
    """The engine's own limits, the same for all sessions. The limits of a policy are in the session's rules."""

    head_bytes: int = 16384
    head_lines: int = 256
    head_s: float = 30.0  # for a complete head, and for a complete ClientHello
    linger_s: float = 2.0
    resolve_s: float = 10.0
    connect_s: float = 5.0  # to one address
    dial_s: float = 15.0  # to all of them
    notice_s: float = 0.05  # for the record of a refusal to arrive before the answer leaves
    half_closed_s: float = 300.0  # without a byte, once one side has ended
    # Between two reports of bytes. If the proxy is killed, the unreported bytes are lost.
    report_s: float = 0.2
    report_bytes: int = 2**20
    close_s: float = 5.0  # for connections that are cut off to be closed
    addresses: int = 4  # of one name that are tried
    resolutions: int = 32  # names in flight for one session
    resolving: int = 256  # connections of one session that wait for the addresses of their names
    cached_names: int = 64  # per session
    cache_s: float = 5.0
    asked: int = 16  # targets of one session that wait for an approval
    held: int = 64  # connections of one session that wait for them
    held_check_s: float = 1.0  # between two checks whether the client of a held connection is still there
    # Connections of one session that are accepted and not made: head unfinished, or refused and lingering. Past it
    # nothing is accepted: further ones wait in the kernel's backlog, at the cost of their session alone.
    waiting: int = 32
    held_bytes: int = 2**25  # by all tunnels together; past it each holds little
    descriptors: int = 0  # for all connections and listeners together; 0: as many as the process
    # A session's accepted connections, so that a flood of refused ones leaves the processor to other sessions.
    accept_burst: int = 100
    accepts_per_s: float = 20.0


class Resolver(Protocol):
    async def resolve(self, host: str) -> Sequence[str]:
        """Returns the addresses of a canonical name, best first. Raises Unresolved, asyncio.TimeoutError. It is called
        once for all connections that wait for the name, and cancelled when it takes too long."""


class Connector(Protocol):
    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        """Returns a non-blocking socket that is connected to `target` at `address`. `deadline` is in the loop's time.
        Raises OSError, DeadlinePassed, Refusal. `address` was classified, and is empty where there is no resolver: the
        connector is then trusted to resolve the name (an upstream proxy)."""


class AddressClassifier(Protocol):
    def why_refused(self, address: str) -> Optional[str]:
        """A clause ("is a private address"), or None when connections to the address may be made."""


class Reporter(Protocol):
    """Receives reports. No call may block. Dictionaries have the fields of core.network's values."""

    def opened(self, session_id: str, connection: Dict[str, Any]) -> None: ...

    def closed(self, session_id: str, connection: Dict[str, Any]) -> None: ...

    async def denied(self, session_id: str, denial: Dict[str, Any]) -> None:
        """Returns when the record has arrived. It is started at once and cancelled after `Limits.notice_s`: the record
        must be on its way before the first await."""

    async def ask(self, session_id: str, target: Target) -> str:
        """Asks for an approval; returns why it was denied, as a clause, or nothing when connections may be made.
        Cancelled when no connection waits for it any more."""

    def misused(self, session_id: str) -> None:
        """The session's listener was made to block the proxy. It is closed, and nothing is served until the session is
        served again."""

    def moved(self, session_id: str, sent_bytes: int, received_bytes: int) -> None:
        """Bytes since the last call; before every `closed`, and after `Limits.report_s` or `report_bytes`."""


class Dialled(NamedTuple):
    sock: socket.socket  # connected, non-blocking
    address: str


class Terminator(Protocol):
    async def terminate(self, tunnel: Connection) -> None:
        """Serves a CONNECT that was answered with 200. Raises Refusal when the connection as a whole is refused (the
        engine records it, and sends nothing but its `parting`), Ended, and OSError or ssl.SSLError when it broke.

        The engine keeps owning the connection: its records, its limits, its end. When its time is over, its rule is
        removed or the session ends, the engine cancels this call. The terminator requests room before it reads, counts
        the bytes (as splice.py and forward.py do), and lets Ended pass through. The engine closes `client` and
        `upstream` afterwards (a second close is harmless); connections made by `dial` belong to the terminator.
        """
