"""The sessions of a tenant over HTTP, where no connection owns them: named sessions at the daemon.

Nothing is remembered between calls, so that any process of the server can serve any call. A session belongs to the
tenant of the call's token and is detached; its idle time ends it. A new name, or the name of an ended session, gives an
empty session, and the result says so.

The daemon's name has a digest of the server's options. So a session with more rights, made by a server with other
options for the same tenant, is never found here.
"""

from __future__ import annotations

import hashlib

from executor_client.aio import AsyncExecutorClient
from executor_client.errors import PreconditionError, SessionGone
from executor_client.mcp.sessions import (
    NamedSession,
    SessionRequest,
    Sessions,
    check_name,
    no_such_session,
)
from executor_client.results import SessionInfo, SessionState

_DIGEST_CHARS = 8


class TenantSessions(Sessions):
    """The sessions of one tenant. `sessions_max` counts those of all its hosts; several servers that create sessions at
    the same moment may exceed it, up to the tenant's quota."""

    def __init__(self, client: AsyncExecutorClient, request: SessionRequest, *, sessions_max: int) -> None:
        super().__init__(client, request, sessions_max=sessions_max)
        self._prefix = f"mcp-{hashlib.sha256(repr(request).encode()).hexdigest()[:_DIGEST_CHARS]}-"
        self._making: set[str] = set()

    async def get(self, name: str, *, make: bool) -> NamedSession:
        check_name(name)
        try:
            session = await self._client.get_session(name=self._prefix + name)
        except SessionGone:
            if not make:
                raise no_such_session(name, await self._infos()) from None
            return await self._make(name)
        named = NamedSession(name, session)
        if session.info.state is SessionState.LOST:
            named.lose(session.info.lost_reason)
        return named

    async def _make(self, name: str) -> NamedSession:
        self._check_number({*await self._infos(), *self._making} - {name})
        self._making.add(name)
        try:
            session = await self._create(name, name=self._prefix + name, detached=True)
        except PreconditionError as error:
            if error.reason != "NAME_TAKEN":
                raise
            return await self.get(name, make=False)  # another call was faster
        finally:
            self._making.discard(name)
        return NamedSession(name, session, note=f"[the session {name!r} is new and empty]")

    async def close(self, name: str) -> None:
        check_name(name)
        try:
            session = await self._client.get_session(name=self._prefix + name)
        except SessionGone:
            raise no_such_session(name, await self._infos()) from None
        await session.close()

    async def described(self) -> list[tuple[str, str, SessionInfo | None]]:
        return [
            (name, f"gone: {info.lost_reason}", None)
            if info.state is SessionState.LOST
            else (name, info.state.value, info)
            for name, info in sorted((await self._infos()).items())
        ]

    async def _infos(self) -> dict[str, SessionInfo]:
        """Returns the tenant's sessions by their names here."""
        infos = await self._client.list_sessions()
        return {info.name.removeprefix(self._prefix): info for info in infos if info.name.startswith(self._prefix)}
