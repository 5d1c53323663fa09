"""The parts that all pages share: the daemon, whole pages and parts of pages, and streams of changes.

A page is a module with `routes(console)`, and templates. Every expression of a template is escaped, and passes through
`text.clean`, so that no template has to remember where a text comes from.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import jinja2
import structlog
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from executor_server.console.access import Browser
from executor_server.console.daemon import Daemon, DaemonError
from executor_server.console.following import Watches
from executor_server.console.formats import FILTERS
from executor_server.console.text import clean

STREAMS_MAX = 256
"""Streams of changes at a time; each open page has one."""
PIECE_CHARS = 64 * 1024
KEEPALIVE_S = 15.0
"""Seconds without a change until a comment is sent, so that a reader that has left is noticed."""
NAVIGATION = (
    ("/", "Overview", ""),
    ("/sessions", "Sessions", "sessions"),
    ("/approvals", "Approvals", "approvals"),
    ("/refusals", "Refusals", "sessions"),
    ("/recordings", "Recordings", ""),
    ("/environments", "Environments", "status"),
    ("/fleet", "Fleet", "status"),
    ("/audit", "Audit", "sessions"),
    ("/policy", "Policy", "sessions"),
)
"""The links on every page. A page is omitted if the daemon refuses its watch, because the token lacks a role.

The watch of sessions needs the role viewer, like the calls of the pages that name it.
"""

_STATUSES = {
    "NOT_FOUND": 404,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 403,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "UNIMPLEMENTED": 501,
}
"""HTTP statuses for the daemon's."""

_log = structlog.get_logger(__name__)


class Console:
    """The object that pages share."""

    def __init__(self, daemon: Daemon, *, actions: bool) -> None:
        self.daemon = daemon
        self.actions = actions
        """The switch: without it every action is 403, and no button is shown."""
        self.watches = Watches(daemon, self.fragment)
        """The sessions with viewers."""
        self._streams = 0
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            finalize=clean,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(FILTERS)
        self._templates.globals["actions"] = actions
        for name in self._templates.list_templates():
            self._templates.get_template(name)  # compiled now: the first page must not wait for it

    def page(
        self, request: Request, template: str, *, status: int = 200, events: str = "/events", **values: Any
    ) -> Response:
        """Returns a whole page. `events` is the path of its stream; every stream has the layout's changes, too."""
        browser: Browser | None = request.state.browser
        if browser is not None:
            self.daemon.attend()
        text = self.fragment(
            template,
            path=request.url.path,
            navigation=self._navigation() if browser is not None else (),
            csrf="" if browser is None else browser.csrf,
            events=events if browser is not None else "",
            **self._layout(),
            **values,
        )
        return HTMLResponse(text, status)

    def _navigation(self) -> list[tuple[str, str]]:
        refused = {name for name, error in self.daemon.errors.items() if error.status == "PERMISSION_DENIED"}
        return [(path, name) for path, name, watch in NAVIGATION if watch not in refused]

    def fragment(self, template: str, **values: Any) -> Markup:
        """Returns a part of a page, for a stream, for htmx, or as a value of another template."""
        return Markup(self._templates.get_template(template).render(values))

    def problem(self, request: Request, status: int, text: str) -> Response:
        """Returns the page for a request that is refused or has failed."""
        return self.page(request, "problem.html", status=status, title=HTTPStatus(status).phrase, text=text)

    def daemon_problem(self, request: Request, error: DaemonError) -> Response:
        """Returns the page for a call that the daemon refused or did not answer."""
        return self.problem(request, _STATUSES.get(error.status, 502), error.message)

    def events(self, request: Request, *sources: AsyncIterator[tuple[str, str]]) -> Response:
        """Streams the layout's changes and those of `sources` (name, HTML), until the browser signs out.

        When all sources have ended, the event "close" follows, with which a page ends its stream.
        """
        if self._streams >= STREAMS_MAX:
            return Response(f"{STREAMS_MAX} pages are open; close some", 503, {"retry-after": "30"})
        stream = self._stream(request.state.browser, sources)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    def require_actions(self) -> None:
        """Raises HTTPException if this console may not act."""
        if not self.actions:
            raise HTTPException(403, "This console only shows. Start it with --actions to let it act.")

    async def _stream(
        self, browser: Browser, sources: Sequence[AsyncIterator[tuple[str, str]]]
    ) -> AsyncGenerator[str, None]:
        # Each pump waits until its change is taken, and this generator until the reader has taken one. So all changes
        # in between are sent as one.
        queue: asyncio.Queue[tuple[str, str]] = asyncio.Queue(1)
        endless = (self._approvals(), self._away(), _end(browser))
        pumps = [asyncio.create_task(self._pump(each, queue)) for each in (*endless, *sources)]
        left = pumps[len(endless) :]
        pumps.append(asyncio.create_task(_close_after(left, queue)))
        self._streams += 1
        try:
            while browser.is_signed_in:
                self.daemon.attend()
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        name, html = await queue.get()
                except TimeoutError:
                    yield ":\n\n"
                    continue
                if browser.is_signed_in:
                    for piece in _event(name, html):
                        yield piece
            text = "This page no longer changes: you were signed out, or the console has stopped. Load it again."
            for piece in (*_event("away", self.fragment("problem_part.html", text=text)), *_event("close", "")):
                yield piece
        finally:
            self._streams -= 1
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, source: AsyncIterator[tuple[str, str]], queue: asyncio.Queue[tuple[str, str]]) -> None:
        try:
            async with aclosing(cast("AsyncGenerator[tuple[str, str], None]", source)) as changes:
                async for change in changes:
                    await queue.put(change)
        except DaemonError as error:
            await queue.put(("problem", self.fragment("problem_part.html", text=error.message)))
        except Exception:  # noqa: BLE001 - the stream of one page must not fail in silence
            _log.exception("stream_failed")
            text = "The console failed. Its log has the reason."
            await queue.put(("problem", self.fragment("problem_part.html", text=text)))

    async def _approvals(self) -> AsyncGenerator[tuple[str, str], None]:
        changes, shown = self.daemon.approvals_changes, ""
        seen = -1
        while True:
            seen = await changes.after(seen)
            if (html := self.fragment("approvals_count.html", **self._layout())) != shown:
                shown = html
                yield "approvals-count", html

    async def _away(self) -> AsyncGenerator[tuple[str, str], None]:
        seen = -1
        while True:
            seen = await self.daemon.away_changes.after(seen)
            yield "away", self.fragment("away.html", **self._layout())

    def _layout(self) -> dict[str, Any]:
        return {"approvals_waiting": self.daemon.waiting, "away_since": self.daemon.away_since}


async def _end(browser: Browser) -> AsyncGenerator[tuple[str, str], None]:
    """Wakes a stream whose browser signs out."""
    await browser.ended.wait()
    yield "close", ""


def _event(name: str, html: str) -> Iterator[str]:
    """Yields an event in pieces. A stalled reader holds one piece; all readers share `html`."""
    begin = f"event: {name}\ndata: "
    for start in range(0, len(html) or 1, PIECE_CHARS):
        end = "\n\n" if start + PIECE_CHARS >= len(html) else ""
        yield begin + html[start : start + PIECE_CHARS].replace("\n", "\ndata: ") + end
        begin = ""


async def _close_after(pumps: Sequence[asyncio.Task[None]], queue: asyncio.Queue[tuple[str, str]]) -> None:
    if pumps:
        await asyncio.wait(pumps)
        await queue.put(("close", ""))
