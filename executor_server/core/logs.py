"""Structured logs, on stderr: one event with its ids per line, as JSON or for a terminal.

Events carry `session_id` and `execution_id` where they concern one. Code, values, tokens and text from a sandbox
are never logged above DEBUG, and tracebacks are printed without local variables for the same reason.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import structlog
from structlog.typing import EventDict, Processor

LogFormat = Literal["auto", "console", "json"]


class _StderrLogger:
    """Writes lines. When stderr can't be written to any more, the daemon goes on: sessions matter more than the log."""

    def msg(self, line: str) -> None:
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except OSError:
            pass

    debug = info = warning = error = critical = exception = msg


def configure(level: str, log_format: LogFormat) -> None:
    """Sends the events of structlog and of the standard library (grpc's and asyncio's) to stderr.

    structlog writes by itself: the standard library would cost more than the rest of a short execution's path.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _rendering(log_format)
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=lambda *_names: _StderrLogger(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.INFO))


def _rendering(log_format: LogFormat) -> list[Processor]:
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        console = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        return [structlog.processors.format_exc_info, _escaped, console]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]


def _escaped(_logger: Any, _method: str, event: EventDict) -> EventDict:
    # Clients choose some texts, and a terminal obeys control characters. Only tracebacks keep their line breaks.
    return {
        key: "".join(
            each if each.isprintable() or (each, key) == ("\n", "exception") else ascii(each)[1:-1] for each in value
        )
        if isinstance(value, str)
        else value
        for key, value in event.items()
    }


def _to_json(event: Any, default: Callable[[Any], Any] | None = None) -> str:
    # Escaped to ASCII, so that no character that a client chose can break a line or control a terminal.
    return _encoder(default).encode(event)


@cache
def _encoder(default: Callable[[Any], Any] | None) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=True, default=default)
