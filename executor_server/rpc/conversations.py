"""The open streams of Converse: their number, the end of unused ones, and of those whose session ends.

A client keeps one stream open for each of its sessions. That must cost others nothing. A stream without an execution
counts against no quota; the longest unused one ends as soon as a session, a tenant or the daemon has too many, and
each after a minute: its client opens another when it needs one. So idle streams neither use up the calls of a
connection, of which HTTP/2 has a bounded number, nor those of the daemon, and keep no connection open.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from executor_server.core import (
    ExecutorError,
    NotFound,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SessionFacts,
    Unavailable,
)
from executor_server.lifecycle import Observer
from executor_server.rpc.auth import current_caller, current_principal
from executor_server.rpc.conversation import Conversation
from executor_server.rpc.errors import passed_on
from executor_server.rpc.handlers import Context
from executor_server.rpc.messages import current_calls

MAX_PER_SESSION = 8
MAX_PER_TENANT = 64
"""Less than the calls of one connection (`server.max_concurrent_streams`), which all of a tenant may share."""
MAX_IN_ALL = 512
"""Less than the calls of the daemon (`server.max_concurrent_calls`)."""
IDLE_S = 60.0
"""Seconds after which an unused stream ends. Less than `server.connection_idle_s`."""
SWEEP_S = 5.0
RETRY_S = 1.0


class Conversations(Observer):
    """Owns the streams of Converse. As an observer it hears of the ends of sessions."""

    def __init__(self) -> None:
        self._open: dict[Conversation, str] = {}  # their tenants, the oldest stream first
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def serve(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Serves one stream to its end."""
        tenant = current_principal.get().tenant
        if self._closed:
            raise Unavailable(Reason.DRAINING, "the daemon is about to stop and takes no new streams")
        conversation = Conversation(context, current_calls.get(), current_caller.get())
        self._make_room(tenant)
        self._open[conversation] = tenant
        self._sweep_later()
        try:
            await conversation.serve(requests, self._begin)
        finally:
            del self._open[conversation]

    def close(self) -> None:
        """Ends every stream that has nothing to do, and each other one as soon as it has not."""
        self._closed = True
        for conversation in list(self._open):
            conversation.end()

    def session_lost(self, session: SessionFacts, reason: str) -> None:
        self._end(session, PreconditionFailed(Reason.SESSION_LOST, f"the session's sandbox is gone: {reason}"))

    def session_ended(self, session: SessionFacts, reason: str) -> None:
        self._end(session, NotFound(Reason.SESSION_NOT_FOUND, f"the session has ended: {reason}"))

    def _end(self, session: SessionFacts, error: ExecutorError) -> None:
        for conversation, tenant in list(self._open.items()):
            if conversation.session_id == session.session_id and tenant == session.owner.tenant:
                conversation.end(passed_on(error))

    # -- room ----------------------------------------------------------------------------------------------------

    def _make_room(self, tenant: str) -> None:
        """Ends the longest unused stream where there are too many. Raises ResourceExhausted when all are used."""
        tenants = Counter(self._open.values())
        if tenants[tenant] >= MAX_PER_TENANT:
            self._end_one([each for each, owner in self._open.items() if owner == tenant], "this tenant")
        elif len(self._open) >= MAX_IN_ALL:
            # The one with the most gives way, so that one tenant can't take the streams of all others.
            most = max(tenants, key=tenants.__getitem__)
            self._end_one([each for each, owner in self._open.items() if owner == most], "the daemon")

    def _begin(self, conversation: Conversation) -> None:
        tenant = self._open[conversation]
        others = [
            each
            for each, owner in self._open.items()
            if each is not conversation and each.session_id == conversation.session_id and owner == tenant
        ]
        if len(others) >= MAX_PER_SESSION:
            self._end_one(others, "this session")

    def _end_one(self, conversations: list[Conversation], whose: str) -> None:
        unused = [each for each in conversations if each.quiet_since_s is not None]
        if not unused:
            text = f"all {len(conversations)} streams that {whose} may have are in use; plain calls are served"
            raise ResourceExhausted(Reason.QUEUE_FULL, text, retry_after_s=RETRY_S)
        min(unused, key=lambda each: each.quiet_since_s or 0.0).end()

    def _sweep_later(self) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._end_unused)

    def _end_unused(self) -> None:
        self._sweep = None
        now_s = time.monotonic()
        for conversation in list(self._open):
            if conversation.quiet_since_s is not None and conversation.quiet_since_s <= now_s - IDLE_S:
                conversation.end()
        if self._open:
            self._sweep_later()
