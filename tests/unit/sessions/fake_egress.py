"""An egress proxy without a process: a test has it report, and sees what it was asked.

It keeps what `Egress` promises (tests/contract/test_egress.py): it takes listeners over, reports each connection's end
once, waits at a bound, and has reported everything when `settle` and `release` return. What it has done and not reported
yet is in `unreported`, as the bytes of a fifth of a second are in the real one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from executor_server.core.network import EgressConnection, EgressDenial, NetworkRules, NetworkUsage
from executor_server.guest.egress import reasons
from executor_server.network.egress import EgressError, EgressSink, RemoteListener


@dataclass
class BoundSession:
    """A session as the proxy knows it."""

    rules: NetworkRules
    listener: socket.socket
    sink: EgressSink
    used: NetworkUsage
    total_bytes: int | None
    exhausted: str | None = None
    moved_bytes: int = 0
    open: dict[str, EgressConnection] = field(default_factory=dict)
    unreported: list[Callable[[], None]] = field(default_factory=list)

    @property
    def room_bytes(self) -> int | None:
        """The bytes that it may still move; None: as many as it likes."""
        return None if self.total_bytes is None else max(0, self.total_bytes - self.moved_bytes)


class FakeEgress:
    """Serves nothing by itself. `failures` are raised by the next calls of `bind`; `barrier`, when not set, holds them."""

    def __init__(self) -> None:
        self.sessions: dict[str, BoundSession] = {}
        self.failures: list[EgressError] = []
        self.barrier = asyncio.Event()
        self.barrier.set()
        self.binds = 0
        self.settled = 0
        self._connections = 0

    @property
    def ca_bundle(self) -> Path:
        raise EgressError("A fake has no certificates.")

    async def bind(
        self,
        session_id: str,
        rules: NetworkRules,
        listener: socket.socket | RemoteListener,
        sink: EgressSink,
        used: NetworkUsage,
        total_bytes: int | None = None,
    ) -> None:
        assert isinstance(listener, socket.socket), "a fake serves sandboxes of this host only"
        self.binds += 1
        try:
            await self.barrier.wait()
            if self.failures:
                raise self.failures.pop(0)
        except BaseException:
            listener.close()
            raise
        await self.release(session_id)
        moved_bytes = used.sent_bytes + used.received_bytes
        self.sessions[session_id] = BoundSession(rules, listener, sink, used, total_bytes, moved_bytes=moved_bytes)

    def change(self, session_id: str, rules: NetworkRules) -> None:
        if (session := self.sessions.get(session_id)) is not None:
            session.rules = rules
            for connection in [each for each in session.open.values() if each.rule not in rules.allowed]:
                self.end(session_id, connection, reasons.RULE_GONE)

    def allow(self, session_id: str, total_bytes: int | None) -> None:
        if (session := self.sessions.get(session_id)) is not None:
            session.total_bytes = total_bytes

    def exhaust(self, session_id: str, reason: str | None) -> None:
        if (session := self.sessions.get(session_id)) is not None:
            session.exhausted = reason
            if reason is not None:
                for connection in list(session.open.values()):
                    self.end(session_id, connection, reason)

    async def settle(self, session_id: str) -> None:
        self.settled += 1
        await asyncio.sleep(0)
        if (session := self.sessions.get(session_id)) is not None:
            self._report(session)

    async def release(self, session_id: str) -> None:
        if (session := self.sessions.get(session_id)) is not None:
            self._report(session)
            for connection in list(session.open.values()):
                self.end(session_id, connection, reasons.SESSION_ENDED)
            del self.sessions[session_id]
            session.listener.close()

    # -- what programs do

    def connect(self, session_id: str, host: str = "a.example", port: int = 443) -> EgressConnection | None:
        """A program connects to a host. Returns None when it was refused."""
        session = self.sessions[session_id]
        rule = next((rule for rule in session.rules.allowed if rule in (host, f"{host}:{port}")), None)
        if session.exhausted is not None or rule is None:
            reason = session.exhausted or reasons.NOT_ALLOWED
            session.sink.connection_denied(EgressDenial(host, port, reason, f"{host}:{port} is refused: {reason}"))
            return None
        self._connections += 1
        connection = EgressConnection(f"c{self._connections}", host, port, "192.0.2.1", rule)
        session.open[connection.connection_id] = connection
        session.sink.connection_opened(connection)
        return connection

    def move(self, session_id: str, sent_bytes: int, received_bytes: int, *, report: bool = True) -> int:
        """A program sends and receives, as far as the bound allows. Returns how many bytes there was no room for."""
        session = self.sessions[session_id]
        room = session.room_bytes
        over = 0 if room is None else max(0, sent_bytes + received_bytes - room)
        received_bytes -= (less := min(over, received_bytes))
        sent_bytes -= over - less
        session.moved_bytes += sent_bytes + received_bytes
        session.unreported.append(lambda: session.sink.moved(sent_bytes, received_bytes))
        if report:
            self._report(session)
        return over

    def end(self, session_id: str, connection: EgressConnection, reason: str = reasons.ENDED) -> None:
        session = self.sessions[session_id]
        self._report(session)
        del session.open[connection.connection_id]
        session.sink.connection_closed(replace(connection, reason=reason, duration_s=1.0))

    def _report(self, session: BoundSession) -> None:
        while session.unreported:
            session.unreported.pop(0)()
