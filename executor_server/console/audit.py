"""The audit log: searched, page by page, with the state of its chain."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.console.audit_log import fields_of, read, search_of, time_of
from executor_server.console.console import Console
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
