"""Commands to a proxy, and its answers and reports, over any transport.

The proxy is as untrusted as a sandbox. If it breaks the form of messages too often, it has a fault or was taken over.
Odd values are dropped and counted, since a sandbox may have found out how to cause them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import structlog

from executor_server.network.egress.bound import BoundSession
from executor_server.network.egress.interface import EgressError
from executor_server.network.egress.reports import BadReport, count, target_of, text

_MAX_BAD_REPORTS = 1000
_LOGGED_BAD_REPORTS = 10
_MAX_MESSAGE_CHARS = 1000

_log = structlog.get_logger(__name__)

Message = dict[str, Any]


class ProxyEnded(EgressError):
    """The proxy ended before it answered."""


class Commands:
    """Numbers commands, waits for their answers, and passes reports to their sessions."""

    def __init__(
        self,
        write: Callable[[Message, int | None], None],
        session_of: Callable[[str], BoundSession | None],
        on_broken: Callable[[str], None],
    ) -> None:
        """`write` sends a message, with a descriptor or None. `on_broken` gets the reason why the proxy is unusable."""
        self._write = write
        self._session_of = session_of
        self._on_broken = on_broken
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._bad_reports = 0

    def send(self, message: Message) -> None:
        """Sends a command without an answer."""
        self._write(message, None)

    def asked(self, message: Message, descriptor: int | None = None) -> int:
        """Sends a command with an answer; returns its number, for `answer`. Raises EgressError."""
        number = next(self._numbers)
        self._write({**message, "number": number}, descriptor)
        self._answers[number] = asyncio.get_running_loop().create_future()
        return number

    async def answer(self, number: int, timeout_s: float) -> None:
        """Waits for the answer to a command. Raises EgressError if it failed, is late, or the proxy has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._answers[number]
        except TimeoutError:
            raise EgressError(f"The egress proxy did not answer within {timeout_s:g} seconds.") from None
        finally:
            del self._answers[number]

    async def ask(self, message: Message, timeout_s: float) -> None:
        await self.answer(self.asked(message), timeout_s)

    def ask_and_forget(self, message: Message) -> None:
        """Sends a command and ignores its answer."""
        self._write({**message, "number": next(self._numbers)}, None)

    def fail_all(self) -> None:
        """Fails all waiting commands, since the proxy has ended. Later messages are another process's."""
        self._bad_reports = 0
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ProxyEnded("The egress proxy ended."))

    def take(self, message: Message) -> None:
        """Takes a message of the proxy, which is as untrusted as a sandbox."""
        kind = message["type"]
        try:
            if kind in ("done", "failed"):
                return self._take_answer(message)
            session_id = message.get("session")
            session = self._session_of(session_id) if isinstance(session_id, str) else None
            if session is None:  # just released, or it never existed
                raise BadReport("its session is not bound")
            if kind == "asks":
                session.ask(count(message.get("number")), target_of(message), self.send)
            else:
                session.take(message)
            if kind == "denied":
                # Later in this round of the loop, so that the sink's notice to the guest is sent first.
                ack = {"type": "ack", "number": count(message.get("number"))}
                asyncio.get_running_loop().call_soon(self.send, ack)
        except BadReport as error:
            self._drop(kind, error)

    def _take_answer(self, message: Message) -> None:
        answer = self._answers.get(count(message.get("number")))
        if answer is None or answer.done():  # too late for its caller
            return
        if message["type"] == "done":
            answer.set_result(None)
        else:
            answer.set_exception(EgressError(text(message.get("message"), _MAX_MESSAGE_CHARS)))

    def _drop(self, kind: str, error: BadReport) -> None:
        self._bad_reports += 1
        if self._bad_reports <= _LOGGED_BAD_REPORTS:
            _log.warning("egress_report_dropped", kind=text(kind, 20), reason=str(error))
        if self._bad_reports >= _MAX_BAD_REPORTS:
            self._on_broken("it sends reports that are none")
