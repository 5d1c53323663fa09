"""The proxy: sessions by their ids, each with a listener and rules of its own.

Its caller gives it listeners made inside sandboxes, rules, a resolver, a classifier of addresses and a reporter. It
needs a running loop, and nothing else of its process.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
from typing import Awaitable, Dict, Optional

from . import reasons
from .accepting import Acceptor
from .accounts import ByteAccount, Room
from .dial import Dialer, DirectConnector
from .host_rules import Rules
from .protocols import (
    AddressClassifier,
    Connector,
    Limits,
    Reporter,
    Resolver,
    Terminator,
    Used,
)
from .session import Session

_LIMITS = Limits()
_UNUSED = Used()
_MANY_FILES = 2**20


class Proxy:
    def __init__(
        self,
        *,
        resolver: Optional[Resolver],
        classifier: AddressClassifier,
        reporter: Reporter,
        connector: Optional[Connector] = None,
        terminator: Optional[Terminator] = None,
        limits: Limits = _LIMITS,
    ) -> None:
        """Without a resolver, the connector is trusted with names (an upstream proxy that resolves them itself)."""
        self._resolver = resolver
        self._classifier = classifier
        self._reporter = reporter
        self._connector = connector or DirectConnector()
        self._terminator = terminator
        self._limits = limits
        self._sessions: Dict[str, Session] = {}
        self._acceptor = Acceptor()
        self._room = Room(limits.descriptors or _open_files())

    def serve(self, session_id: str, listener: socket.socket, rules: Rules, *, used: Used = _UNUSED) -> None:
        """Serves a session on its listener, which it takes over. The same id again replaces listener, rules and use;
        connections that the rules allow go on."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.replace_listener(listener)
            session.account.set_used(used)
            session.change(rules)
            return
        dialer = Dialer(self._resolver, self._classifier, self._connector, self._limits)
        account = ByteAccount(session_id, self._reporter, rules, used, self._limits)
        self._sessions[session_id] = Session(
            session_id,
            listener,
            rules,
            account,
            dialer,
            self._reporter,
            self._terminator,
            self._limits,
            self._room,
            self._acceptor,
            prefix=secrets.token_hex(3),  # connection ids stay unique when the session is served again
        )
        self._room.sessions += 1

    def change(self, session_id: str, rules: Rules) -> None:
        """Sets new rules; connections whose rule is gone end at once. This and the methods below ignore a session that
        is not served: it may have ended while the command was on its way."""
        if session_id in self._sessions:
            self._sessions[session_id].change(rules)

    def allow(self, session_id: str, total_bytes: Optional[int]) -> None:
        """Bounds the bytes that a session has sent and received together, including earlier use. At the bound its
        connections wait for a higher one. `moved` is reported at half of what is left, and at the bound."""
        if session_id in self._sessions:
            self._sessions[session_id].account.allow(total_bytes)

    def report(self, session_id: str) -> None:
        """Reports the unreported bytes."""
        if session_id in self._sessions:
            self._sessions[session_id].account.report()

    def set_exhausted(self, session_id: str, reason: Optional[str]) -> None:
        """With a reason: ends the session's connections and refuses new ones. None: serves again."""
        if session_id in self._sessions:
            self._sessions[session_id].set_exhausted(reason or "")

    def dismiss_held(self, why: str) -> None:
        """Refuses all connections that wait for an approval, at once: this process is about to end."""
        for session in self._sessions.values():
            session.dismiss_held(reasons.PROXY_ENDED, why)

    def end(self, session_id: str) -> Awaitable[None]:
        """Closes the listener and the connections of a session; to be awaited.

        The call itself frees the id, before anything is awaited: a session that is served under it in between is not
        ended.
        """
        session = self._sessions.pop(session_id, None)
        if session is None:
            return _nothing()
        self._room.sessions -= 1
        return session.end(reasons.SESSION_ENDED)

    async def close(self) -> None:
        sessions = list(self._sessions.values())
        self._sessions.clear()
        self._room.sessions = 0
        self._acceptor.close()
        await asyncio.gather(*(session.end(reasons.PROXY_ENDED) for session in sessions))


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MANY_FILES if soft == resource.RLIM_INFINITY else soft


async def _nothing() -> None:
    """The end of a session that is not served."""
