"""The seam between sessions and the egress proxy: what the service promises, and to whom it reports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from executor_server.core import EgressConnection, EgressDenial, NetworkRules, NetworkUsage, SandboxFailure


class EgressError(SandboxFailure):
    """The egress proxy can't do what is asked; the message is a sentence that says why and what to do.

    It is for the administrator and may name paths of the host: a session's client only learns that there is no network.
    """


@dataclass(frozen=True)
class EgressSettings:
    """The administrator's settings for the way out, checked for their form ([egress] of the configuration)."""

    internal: tuple[str, ...] = ()  # ranges of private addresses that names may resolve to
    resolver: tuple[str, ...] = ()  # DNS servers as ADDRESS:PORT; empty: as the host resolves
    upstream_proxy: str | None = None  # http://HOST:PORT
    upstream_resolves: bool = False  # names are left to the upstream proxy, and their addresses unchecked
    ca_file: Path | None = None  # PEM certificates of authorities that hosts may have besides the system's
    secrets: Mapping[str, Path] = field(default_factory=dict)  # files, by the names that policies use


class EgressSink(Protocol):
    """Notified of one session's network, in the daemon's loop. Its methods must neither block nor raise.

    Every value was checked: it has the form that its class promises, is bounded, and is printable in one line. It may
    still be untrue, since a proxy that was taken over can report anything about the sessions that it serves.
    """

    def connection_opened(self, connection: EgressConnection) -> None:
        """A connection was made. Its `connection_id` is new in this session, also after the proxy was restarted."""

    def connection_closed(self, connection: EgressConnection) -> None:
        """A connection that was reported as opened has ended. Called once for each, whatever dies."""

    def connection_denied(self, denial: EgressDenial) -> None:
        """A connection or request was refused. The program gets its answer after this, so the log has it first."""

    def denials_uncounted(self, count: int) -> None:
        """So many refusals more were not reported one by one, because they came too fast."""

    def listener_misused(self) -> None:
        """The sandbox tried to block the proxy by its listener, and has no network any more."""

    def moved(self, sent_bytes: int, received_bytes: int) -> None:
        """So many bytes more were sent and received since the last call. The sums are the session's totals."""


class RemoteListener(Protocol):
    """The listener of a sandbox on another machine, by those who can start a proxy beside it there."""

    def next_token(self) -> str:
        """A token that the guest takes for its listener; no other has been shown it. Raises SandboxFailure."""
        ...

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Starts a proxy in the machine and opens a stream to it. Raises SandboxFailure."""
        ...

    async def allow_hosts(self, hosts: Sequence[str]) -> None:
        """Lets the machine itself reach these hosts and no others. Raises SandboxFailure."""
        ...


class Egress(Protocol):
    """The egress proxy as sessions use it. `EgressService` is the implementation."""

    @property
    def ca_bundle(self) -> Path:
        """A file with the system's certificate authorities, those of `ca_file`, and the proxy's own.

        Sandboxes with a network get it read-only. The same content always has the same path; a file that was handed
        out is never changed. The first use in a state directory's life blocks for up to half a second, later ones
        do not. Raises EgressError.
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
        """Serves the listener of a session's sandbox from now on, and reports to `sink`.

        Takes the listener over and closes it in every case. `used` are the session's totals so far: `max_sent_bytes`
        and `max_received_bytes` count from there; `total_bytes` is the bound as in `allow`. Starts the proxy's process
        when this is the first session. From the return on, the session stays bound until `release`, whatever becomes of
        the process: connections that wait in the listener's queue are served by the next one. A session that is bound
        already gets the new listener.

        Raises EgressError when the proxy can't serve it, and then nothing is bound.
        """
        ...

    def change(self, session_id: str, rules: NetworkRules) -> None:
        """Applies other rules; connections that they do not allow are closed. Ignores sessions that are not bound."""
        ...

    def allow(self, session_id: str, total_bytes: int | None) -> None:
        """Bounds what a session has sent and received together in all, `used` included; None: no bound, as at first.

        At the bound its connections are not closed: no more is read until a higher bound comes. `moved` is reported at
        once when a session has half of its bound's rest left, and at the bound, so a bound that is raised in time
        costs no speed. It may be passed by at most 256 KiB. The bound is a total and not an addition, because reports
        and bounds cross on their way. Ignores sessions that are not bound.
        """
        ...

    def exhaust(self, session_id: str, reason: str | None) -> None:
        """Closes a session's connections and refuses new ones for `reason` (guest/egress/reasons.py), until None."""
        ...

    async def settle(self, session_id: str) -> None:
        """Returns when the sink has all reports of what the proxy had done for a session when this was called.

        The result of an execution waits for it, so it is one exchange with the proxy, and bounded in time: where the
        proxy does not answer, this returns without. Returns at once for sessions that are not bound.
        """
        ...

    async def release(self, session_id: str) -> None:
        """Closes the session's connections and its listener. The sink has all reports when it returns. Idempotent.

        Bounded in time: where the proxy does not answer, what is still open is reported as PROXY_ENDED.
        """
        ...
