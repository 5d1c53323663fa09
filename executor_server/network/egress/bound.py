"""A session that is bound to the proxy: the state that a restarted process needs, and its open connections."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any

from executor_server.core import EgressConnection, EgressDenial, NetworkRules, NetworkUsage
from executor_server.guest.egress import reasons
from executor_server.network.egress.interface import EgressSink
from executor_server.network.egress.reports import BadReport, connection_of, count, denial_of

# Connections beyond the rules' limit that may be reported while the rules change.
_MORE_CONNECTIONS = 64
# Approvals that a session waits for; the proxy asks for fewer at a time, but withdrawals may cross.
_MAX_ASKED = 64


class BoundSession:
    """Keeps a copy of the listener, the rules and the totals, and passes checked reports on to the sink."""

    def __init__(
        self,
        session_id: str,
        rules: NetworkRules,
        listener: socket.socket | None,
        sink: EgressSink,
        used: NetworkUsage,
        total_bytes: int | None,
    ) -> None:
        self.session_id = session_id
        self.rules = rules
        self.listener = listener  # None where the sandbox is on another machine
        self.total_bytes = total_bytes
        self.exhausted: str | None = None
        self.is_settled = True  # the proxy has reported everything
        self._sink = sink
        self._sent_bytes = used.sent_bytes
        self._received_bytes = used.received_bytes
        self._open: dict[str, tuple[EgressConnection, float]] = {}
        self._asked: dict[int, tuple[asyncio.Task[None], tuple[str, int]]] = {}

    def bind_message(self) -> dict[str, Any]:
        return {
            "type": "bind",
            "session": self.session_id,
            "rules": dataclasses.asdict(self.rules),
            "used": {"sent_bytes": self._sent_bytes, "received_bytes": self._received_bytes},
            "total_bytes": self.total_bytes,
        }

    def change_message(self) -> dict[str, Any]:
        return {"type": "change", "session": self.session_id, "rules": dataclasses.asdict(self.rules)}

    def allow_message(self) -> dict[str, Any]:
        return {"type": "allow", "session": self.session_id, "total_bytes": self.total_bytes}

    def exhaust_message(self) -> dict[str, Any]:
        return {"type": "exhaust", "session": self.session_id, "reason": self.exhausted}

    def follow(self, earlier: BoundSession) -> None:
        """Replaces an earlier binding of the same session; its connections go on."""
        self._open.update(earlier._open)
        earlier._open.clear()
        self._asked, earlier._asked = earlier._asked, {}
        earlier.close()

    def ask(self, number: int, target: tuple[str, int], send: Callable[[dict[str, Any]], None]) -> None:
        """Asks the sink for an approval, and sends the answer. Raises BadReport."""
        if number in self._asked or len(self._asked) >= _MAX_ASKED:
            raise BadReport("an approval is asked for twice, or too many are")
        asked = self._asked

        async def answer() -> None:
            try:
                why = await self._sink.host_asked(*target)
                send({"type": "ruled", "number": number, "why": why})
            finally:
                asked.pop(number, None)

        asked[number] = (asyncio.create_task(answer()), target)

    def take(self, message: dict[str, Any]) -> None:
        """Passes a report to the sink. Raises BadReport; the report is dropped then."""
        kind = message["type"]
        self.is_settled = False
        if kind == "moved":
            self._moved(count(message.get("sent_bytes")), count(message.get("received_bytes")))
        elif kind == "opened":
            self._opened(connection_of(message.get("connection"), ended=False))
        elif kind == "closed":
            self._closed(connection_of(message.get("connection"), ended=True))
        elif kind == "denied":
            self._sink.connection_denied(denial_of(message.get("denial")))
        elif kind == "uncounted":
            self._sink.denials_uncounted(count(message.get("count")))
        elif kind == "withdrawn":
            self._withdraw(count(message.get("number")))
        elif kind == "misused":
            self._sink.listener_misused()
        else:
            raise BadReport("its type is unknown")

    def note_settled(self) -> None:
        """Notes that all was reported. With an open connection, there may be more at any time."""
        self.is_settled = not self._open

    def abandon(self) -> None:
        """Reports open connections as ended, since their process is gone.

        The session's totals have the reported bytes; only the process knew the part of each connection.
        """
        now = time.monotonic()
        for connection, since in self._open.values():
            lost = dataclasses.replace(
                connection,
                duration_s=now - since,
                reason=reasons.PROXY_ENDED,
                sent_bytes=None,
                received_bytes=None,
            )
            self._sink.connection_closed(lost)
        self._open.clear()
        for number, (_, (host, port)) in list(self._asked.items()):
            self._withdraw(number)
            why = f"{host}:{port} needs an approval, and the egress proxy was restarted while it waited; connect again"
            self._sink.connection_denied(EgressDenial(host, port, reasons.PROXY_ENDED, why))

    def close(self) -> None:
        self.abandon()
        if self.listener is not None:
            self.listener.close()

    def _withdraw(self, number: int) -> None:
        task, _ = self._asked.pop(number, (None, None))
        if task is not None:
            task.cancel()

    def _moved(self, sent_bytes: int, received_bytes: int) -> None:
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes
        self._sink.moved(sent_bytes, received_bytes)

    def _opened(self, connection: EgressConnection) -> None:
        if connection.connection_id in self._open:
            raise BadReport("a connection was opened twice")
        if len(self._open) >= self.rules.max_connections + _MORE_CONNECTIONS:
            raise BadReport("more connections are open than the rules allow")
        self._open[connection.connection_id] = (connection, time.monotonic())
        self._sink.connection_opened(connection)

    def _closed(self, connection: EgressConnection) -> None:
        if self._open.pop(connection.connection_id, None) is None:
            raise BadReport("a connection was closed that was not open")
        self._sink.connection_closed(connection)
