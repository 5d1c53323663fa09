"""Structured logs, on stderr: one event with its ids per line, as JSON or for a terminal.

Events carry `session_id` and `execution_id` where they concern one. Code, values, tokens and text that came out of a
sandbox are never logged above DEBUG, and tracebacks are printed without local variables for the same reason.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "console", "json"]


def configure(level: str, log_format: LogFormat) -> None:
    """Sends the events of structlog and of the standard library (grpc's and asyncio's) to stderr."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _rendering(log_format: LogFormat) -> list[Processor]:
    if log_format == "console" or (log_format == "auto" and sys.stderr.isatty()):
        console = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        return [console]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=True)]
