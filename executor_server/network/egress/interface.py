"""The interface between sessions and the egress proxy: the promises of the service, and its reports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from executor_server.core import EgressConnection, EgressDenial, NetworkRules, NetworkUsage, SandboxFailure


class EgressError(SandboxFailure):
    """The egress proxy failed; the message is a sentence with the reason and what to do.

    It is for the administrator and may name paths of the host. Clients only learn that there is no network.
    """


@dataclass(frozen=True)
class EgressSettings:
    """The administrator's settings for the network, with their form checked ([egress] of the configuration)."""

    internal: tuple[str, ...] = ()  # ranges of private addresses that names may resolve to
    resolver: tuple[str, ...] = ()  # DNS servers as ADDRESS:PORT; empty: as the host resolves
    upstream_proxy: str | None = None  # http://HOST:PORT
    upstream_resolves: bool = False  # the upstream proxy resolves names, and addresses are not checked
    ca_file: Path | None = None  # PEM certificates of authorities that hosts may have besides the system's
    secrets: Mapping[str, Path] = field(default_factory=dict)  # files, by the names that policies use


class EgressSink(Protocol):
    """Notified of one session's network, in the daemon's loop. Its methods must neither block nor raise.

    Each value has the form of its class, is bounded, and is printable in one line. It may still be false, since a proxy
    that was taken over can report anything about its sessions.
    """

    def connection_opened(self, connection: EgressConnection) -> None:
        """A connection was opened. Its `connection_id` is new in this session, even after a restart of the proxy."""

    def connection_closed(self, connection: EgressConnection) -> None:
        """An open connection has ended. Called once for each, whichever process dies."""

    def connection_denied(self, denial: EgressDenial) -> None:
        """A connection or request was refused. Called before the program gets its answer."""

    def denials_uncounted(self, count: int) -> None:
        """Refused `count` more requests, too fast to report each."""

    async def host_asked(self, host: str, port: int) -> str:
        """Asks for the approval that a connection to this canonical host needs.

        Returns why it was denied, as a clause for the program; empty if the connection may be made. Cancelled when no
        program waits for it any more.
        """
        ...

    def listener_misused(self) -> None:
        """The sandbox tried to block the proxy through its listener, and has lost its network."""

    def moved(self, sent_bytes: int, received_bytes: int) -> None:
        """Bytes sent and received since the last call. Their sums are the session's totals."""


class RemoteListener(Protocol):
    """The listener of a sandbox on another machine, and how to start a proxy there."""

    def next_token(self) -> str:
        """Returns an unused token with which the guest hands out its listener. Raises SandboxFailure."""
        ...

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Starts a proxy on the machine and opens a stream to it. Raises SandboxFailure."""
        ...

    async def allow_hosts(self, hosts: Sequence[str]) -> None:
        """Limits the machine's own network to these hosts. Raises SandboxFailure."""
        ...


class Egress(Protocol):
    """The egress proxy as sessions use it. `EgressService` is the implementation."""

    @property
    def ca_bundle(self) -> Path:
        """A file with the system's certificate authorities, those of `ca_file`, and the proxy's own.

        Sandboxes with a network get it read-only. The same content always has the same path, and a file never changes.
        The first use in a state directory blocks for up to half a second. Raises EgressError.
        """
        ...

    async def bind(
        self,
        session_id: str,
        rules: NetworkRules,
        listener: socket.socket | RemoteListener,
        sink: EgressSink,
        used: NetworkUsage,
        total_bytes: int | None = None,
    ) -> None:
        """Serves the listener of a session's sandbox, and reports to `sink`.

        Takes ownership of the listener, and closes it in every case. `used` are the session's totals so far, from which
        `max_sent_bytes` and `max_received_bytes` count; `total_bytes` is the bound as in `allow`. The first session
        starts the proxy's process. A bound session stays bound until `release`, even if the process dies: connections
        wait in the listener's queue for the next process. If the session is already bound, it gets the new listener.

        Raises EgressError if the proxy can't serve it; nothing is bound then.
        """
        ...

    def change(self, session_id: str, rules: NetworkRules) -> None:
        """Applies new rules; closes connections that they do not allow. Ignores unbound sessions."""
        ...

    def allow(self, session_id: str, total_bytes: int | None) -> None:
        """Sets the bound of all bytes that a session sends and receives, `used` included. None, the default: no bound.

        At the bound its connections stay open, but no more is read until the bound rises. `moved` is reported at once
        when half of the remaining bytes are used, and at the bound, so raising it in time costs no speed. It may be
        exceeded by at most 256 KiB. The bound is a total, not an increment, because reports and bounds cross on their
        way. Ignores unbound sessions.
        """
        ...

    def exhaust(self, session_id: str, reason: str | None) -> None:
        """Closes a session's connections and refuses new ones for `reason` (guest/egress/reasons.py), until None."""
        ...

    async def settle(self, session_id: str) -> None:
        """Returns when the sink has all reports of the session's traffic before this call.

        The result of an execution waits for this, so it is one exchange with a timeout; if the proxy does
        not answer, it returns anyway. Returns at once for unbound sessions.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Closes the session's connections and its listener. The sink has all reports when it returns. Idempotent.

        Has a timeout: if the proxy does not answer, open connections are reported as PROXY_ENDED.
        """
        ...
