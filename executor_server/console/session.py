"""One session: its steps as they happen, and its state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from executor_server.console.console import Console
from executor_server.console.export import EXPORTS_MAX, Export
from executor_server.console.following import TooMany, Watch

CATCH_UP_S = 1.0
"""Seconds that a page waits for the steps that have ended. Later ones come as changes."""

KNOWN_WITHIN_S = 0.5
"""Seconds until the console knows of a new session."""


def routes(console: Console) -> list[BaseRoute]:
    watches = console.watches

    exporting = asyncio.Semaphore(EXPORTS_MAX)

    async def known(request: Request) -> str:
        """Returns the id of a session that the console knows."""
        session_id, daemon = str(request.path_params["session_id"]), console.daemon
        with suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WITHIN_S):
                seen = daemon.sessions_changes.count
                while session_id not in daemon.sessions:
                    seen = await daemon.sessions_changes.after(seen)
        if session_id not in daemon.sessions:
            if (error := daemon.errors.get("sessions")) is not None:
                raise error  # the token may not see sessions, or the daemon was never reached
            raise HTTPException(404, "There is no such session, or it ended more than a day ago.")
        return session_id

    async def watch_of(request: Request) -> Watch:
        try:
            return watches.of(await known(request))
        except TooMany as error:
            raise HTTPException(503, f"{error}.") from error

    async def session(request: Request) -> Response:
        watch = await watch_of(request)
        with suppress(TimeoutError):
            async with asyncio.timeout(CATCH_UP_S):
                await watch.caught_up.wait()
        feed = watch.feed
        return console.page(
            request,
            "session.html",
            events=f"/sessions/{watch.session_id}/events",
            session_id=watch.session_id,
            panel=Markup(feed.panel.element()),
            note=Markup(feed.note.element()),
            steps=Markup(feed.whole()),
        )

    async def events(request: Request) -> Response:
        watch = await watch_of(request)
        return console.events(request, _named(watch.changes_since(0)))

    async def export(request: Request) -> Response:
        session_id = await known(request)
        if exporting.locked():
            raise HTTPException(503, f"{EXPORTS_MAX} sessions are being exported. Try again in a minute.")
        pieces = _while(exporting, Export(console.daemon, console.daemon.sessions[session_id]).pieces())
        return StreamingResponse(
            pieces,
            media_type="text/html",
            headers={"content-disposition": f'attachment; filename="session-{session_id}.html"'},
        )

    return [
        Route("/sessions/{session_id:str}", session),
        Route("/sessions/{session_id:str}/events", events),
        Route("/sessions/{session_id:str}/export", export),
        watches.pictures.route(),
    ]


async def _while(exporting: asyncio.Semaphore, pieces: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with exporting, aclosing(pieces):
        async for piece in pieces:
            yield piece


async def _named(changes: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    async for html in changes:
        yield "changes", html
