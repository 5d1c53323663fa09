"""The audit log: searched, page by page, with the state of its chain; and reading it, for other pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.console import Console
from executor_server.console.daemon import Daemon
from executor_server.console.text import cut

RECORDS_OF_PAGE = 100
SHOWN_CHARS = 1_000
"""Characters of one field; code may be a mebibyte."""
_SHOWN_APART = {"seq", "prev", "hash", "time", "kind", "tenant", "principal", "session"}


def routes(console: Console) -> list[BaseRoute]:
    async def audit(request: Request) -> Response:
        search = search_of(request.query_params)
        rows: list[dict[str, Any]] = []
        older = await read(console.daemon, search, RECORDS_OF_PAGE, lambda record: rows.append(_row(record)))
        return console.page(
            request,
            "audit.html",
            search=search,
            rows=rows[::-1],
            older=search.link("/audit", older) if older else "",
            newest=search.link("/audit") if search.before_seq else "",
            log=None if console.daemon.status is None else console.daemon.status.audit,
        )

    return [Route("/audit", audit)]


def _row(record: admin_pb.AuditRecord) -> dict[str, Any]:
    fields = fields_of(record)
    more = {
        name: value for name, value in fields.items() if name not in _SHOWN_APART and value not in ("", None, [], {})
    }
    return {
        "seq": record.seq,
        "is_sound": record.is_sound,
        "time": time_of(fields),
        "more": {
            name: cut(value if isinstance(value, str) else json.dumps(value), SHOWN_CHARS)
            for name, value in more.items()
        },
        "whole": "" if fields else cut(record.json, SHOWN_CHARS),
        **{name: fields.get(name, "") for name in ("kind", "tenant", "principal", "session")},
    }


# Reading it


@dataclass(frozen=True)
class Search:
    """The filters of a search in the log; an empty one matches everything."""

    tenant: str = ""
    session_id: str = ""
    kinds: str = ""
    """Separated by commas or spaces."""
    text: str = ""
    before_seq: int = 0
    """0: from the newest on."""

    def link(self, path: str, before_seq: int = 0) -> str:
        asked = {"tenant": self.tenant, "session": self.session_id, "kinds": self.kinds, "text": self.text}
        query = {name: value for name, value in (*asked.items(), ("before", before_seq)) if value}
        return f"{path}?{urlencode(query)}" if query else path


def search_of(query: Mapping[str, str]) -> Search:
    """Reads the query of a page. Raises HTTPException."""
    before = query.get("before", "")
    if before and not (before.isascii() and before.isdigit() and len(before) < 20):
        raise HTTPException(400, "`before` is the number of a record.")
    tenant, session_id, kinds, text = (query.get(name, "") for name in ("tenant", "session", "kinds", "text"))
    return Search(tenant, session_id, kinds, text, int(before or 0))


async def read(daemon: Daemon, search: Search, max_records: int, take: Callable[[admin_pb.AuditRecord], None]) -> int:
    """Passes the newest matching records to `take`, oldest first and one by one: there are many, and some are large.

    Returns the number of the record before which older ones follow; 0 if there are none. Raises DaemonError.
    """
    request = admin_pb.TailAuditRequest(
        tenant=search.tenant,
        session_id=search.session_id,
        kinds=search.kinds.replace(",", " ").split(),
        text=search.text,
        before_seq=search.before_seq,
        max_records=max_records,
    )
    continue_before_seq = 0
    async for message in daemon.admin.TailAudit(request):
        for record in message.records:
            take(record)
        continue_before_seq = message.continue_before_seq
    return continue_before_seq


def fields_of(record: admin_pb.AuditRecord) -> dict[str, Any]:
    """Returns the fields of a record; none if it is damaged."""
    try:
        fields = json.loads(record.json)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def time_of(fields: Mapping[str, Any]) -> str:
    """Returns the time of a record to the second, in UTC."""
    return str(fields.get("time", ""))[:19].replace("T", " ")
