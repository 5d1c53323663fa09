"""The interfaces between the proxy and those who run it.

The daemon's egress process and the root part of a machine in the cloud each bring a resolver, a reporter and, where
secrets are set, a terminator of TLS.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Coroutine, Dict, NamedTuple, Optional, Protocol, Sequence, TypeVar

from .host_names import Target
from .host_rules import Allowed
from .refusals import Refusal

if TYPE_CHECKING:
    from .accounts import WorkShare

T = TypeVar("T")


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
    # Between two reports of bytes. What was not reported is lost with a proxy that is killed.
    report_s: float = 0.2
    report_bytes: int = 2**20
    close_s: float = 5.0  # for connections that are cut off to be closed
    addresses: int = 4  # tried of those that one name has
    resolutions: int = 32  # names in flight for one session
    resolving: int = 256  # connections of one session that wait for the addresses of their names
    cached_names: int = 64  # per session
    cache_s: float = 5.0
    asked: int = 16  # targets of one session that wait for an approval
    held: int = 64  # connections of one session that wait for them
    held_check_s: float = 1.0  # between two looks whether the client of a held connection is still there
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
        """The addresses of a canonical name, best first. Raises Unresolved, asyncio.TimeoutError. It is called once for
        the connections that wait for the name, and cancelled when it takes too long."""


class Connector(Protocol):
    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        """A non-blocking socket that is connected to `target` at `address` (loop's time). Raises OSError,
        DeadlinePassed, Refusal. `address` was classified, and is empty where there is no resolver: the connector is
        then trusted to resolve the name (an upstream proxy)."""


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


class Meter(Protocol):
    """Room for the bytes of one connection, and their count.

    Room is asked for directly before bytes are read, and they are counted directly after: connections of a session
    share its bounds, and nothing may come between. Bytes that are not read are not lost, they wait at their sender.
    """

    @property
    def share(self) -> WorkShare:
        """Counts the work of the session, and says when it has to wait."""

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Creates a task that takes part in the share."""

    def send_room(self) -> int:
        """Bytes of the client that may be read now; 0 while the session's window is shut. Raises Ended when the session
        has sent all that its rules allow."""

    def receive_room(self) -> int: ...

    async def room_opened(self) -> None:
        """Returns once there may be room again, where there was none."""

    def call_when_open(self, callback: Callable[[], None]) -> None:
        """Calls back once there may be room again. The same callback twice is one."""

    def forget(self, callback: Callable[[], None]) -> None: ...

    def count_sent(self, count: int) -> None:
        """Counts bytes of the client."""

    def count_received(self, count: int) -> None: ...


class Tunnel(Meter, Protocol):
    """A CONNECT that was answered with 200 and goes to a terminator of TLS instead of being spliced.

    The engine keeps owning the connection: its records, its limits, its end. When its time is over, the rule goes or
    the session ends, it cancels `terminate`. Bytes are the terminator's to count: it asks for room before it reads (as
    splice.py and forward.py do), and lets Ended pass through. The engine closes `client` and `upstream` when
    `terminate` is over (a second close is harmless); what `dial` gave belongs to the terminator.
    """

    session_id: str
    target: Target
    allowed: Allowed  # with the rule's secrets
    client: socket.socket  # non-blocking, with no reader or writer on it
    buffered: bytes  # sent by the client behind the head of its CONNECT; usually nothing
    address: str
    secret_used: str  # set it to the header's name once a secret was sent

    @property
    def upstream(self) -> socket.socket:
        """Non-blocking, connected to a classified address of the target; nothing was sent."""

    async def dial(self) -> Dialled:
        """Another connection to the same target, resolved and classified again. Raises Refusal."""

    async def deny(self, refusal: Refusal) -> None:
        """Records the refusal of one request. The terminator answers it, and may go on."""


class Terminator(Protocol):
    async def terminate(self, tunnel: Tunnel) -> None:
        """Serves the tunnel to its end. Raises Refusal when the connection as a whole is refused (the engine records
        it, and sends nothing but its `parting`), Ended, and OSError or ssl.SSLError when it broke."""
