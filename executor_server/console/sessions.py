"""The sessions: live, and those that ended with the reason; filtered by tenant, image, label and state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_client.replays.timeline import enum_text
from executor_server.console.console import Console

ROWS = 100
"""Sessions on a page."""
PAGES_MAX = 1000
FILTER_CHARS_MAX = 256
SUGGESTIONS_MAX = 200
"""Tenants, and images, that the fields suggest."""
STATES = ("running", "idle", "busy", "paused", "lost", "ended")
"""The choices of the filter; "running" means not ended."""
TABLES_MAX = 64
"""Rendered tables that are kept for other viewers."""


@dataclass(frozen=True)
class Filter:
    """The filters of the list; an empty one matches all sessions."""

    tenant: str = ""
    image: str = ""
    label: str = ""
    """`key=value`, or a key."""
    state: str = ""
    page: int = 1

    @classmethod
    def of(cls, request: Request) -> Filter:
        def text(name: str) -> str:
            return request.query_params.get(name, "").strip()[:FILTER_CHARS_MAX]

        state, page = text("state"), text("page")
        number = int(page) if page.isascii() and page.isdecimal() and len(page) < 5 else 1
        return cls(
            tenant=text("tenant"),
            image=text("image"),
            label=text("label"),
            state=state if state in STATES else "",
            page=min(max(1, number), PAGES_MAX),
        )

    @property
    def query(self) -> str:
        """The filter as the query of a URL."""
        return urlencode({name: value for name, value in asdict(self).items() if value})

    def shows(self, view: admin_pb.SessionView) -> bool:
        session = view.owned.session
        return (
            self.tenant in ("", view.owned.tenant)
            and self.image in ("", session.image)
            and (not self.label or self._has_label(session))
            and (not self.state or self._has_state(view))
        )

    def _has_label(self, session: pb.Session) -> bool:
        key, equals, value = self.label.partition("=")
        return key in session.labels and (not equals or session.labels[key] == value)

    def _has_state(self, view: admin_pb.SessionView) -> bool:
        state = state_of(view)
        return state == self.state or (self.state == "running" and state != "ended")


def state_of(view: admin_pb.SessionView) -> str:
    """Returns one of STATES, or the number of a state that this version does not know."""
    if view.HasField("end_time"):
        return "ended"
    return enum_text(pb.SessionState, view.owned.session.state, "SESSION_STATE_")


def latest(console: Console) -> list[admin_pb.SessionView]:
    """Returns all sessions, the newest first."""

    def age(view: admin_pb.SessionView) -> tuple[int, int]:
        created = view.owned.session.create_time
        return created.seconds, created.nanos

    return sorted(console.daemon.sessions.values(), key=age, reverse=True)


def routes(console: Console) -> list[BaseRoute]:
    changed = console.daemon.sessions_changes

    @lru_cache(1)
    def newest(_change: int) -> list[admin_pb.SessionView]:
        return latest(console)

    @lru_cache(TABLES_MAX)
    def table(change: int, chosen: Filter) -> Markup:
        """Renders a table once for all viewers with the same filter."""
        known = newest(change)
        found = [view for view in known if chosen.shows(view)]
        first = (chosen.page - 1) * ROWS
        return console.fragment(
            "sessions_table.html",
            error=console.daemon.errors.get("sessions"),
            rows=[(state_of(view), view, view.owned.session) for view in found[first : first + ROWS]],
            found=len(found),
            known=len(known),
            first=first,
            newer=replace(chosen, page=chosen.page - 1).query if chosen.page > 1 else "",
            older=replace(chosen, page=chosen.page + 1).query if first + ROWS < len(found) else "",
        )

    async def sessions(request: Request) -> Response:
        chosen, known = Filter.of(request), console.daemon.sessions.values()
        return console.page(
            request,
            "sessions.html",
            events=f"/events/sessions?{chosen.query}",
            chosen=chosen,
            states=STATES,
            tenants=sorted({view.owned.tenant for view in known})[:SUGGESTIONS_MAX],
            images=sorted({view.owned.session.image for view in known})[:SUGGESTIONS_MAX],
            table=table(changed.count, chosen),
        )

    async def events(request: Request) -> Response:
        return console.events(request, changes(Filter.of(request)))

    async def changes(chosen: Filter) -> AsyncIterator[tuple[str, str]]:
        shown, seen = "", -1
        while True:
            seen = await changed.after(seen)
            if (html := table(seen, chosen)) != shown:
                shown = html
                yield "sessions", html

    return [Route("/sessions", sessions), Route("/events/sessions", events)]
