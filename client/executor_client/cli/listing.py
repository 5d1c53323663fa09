"""`executor ps`: the caller's sessions, or the processes of one of them."""

from __future__ import annotations

import argparse
import shlex
from datetime import UTC, datetime

from executor_client._core.session_base import short_id
from executor_client._core.terminal import aligned
from executor_client.cli import EXIT_SUCCEEDED
from executor_client.cli.console import Console
from executor_client.cli.naming import find_session
from executor_client.client import ExecutorClient
from executor_client.process_results import ProcessInfo
from executor_client.results import SessionInfo

_ID_DIGITS = 12
_CELL_CHARS = 40
_SESSION_HEADER: tuple[str, ...] = (
    "SESSION", "NAME", "STATE", "IMAGE", "EXPIRES", "BACKEND", "PYTHON", "GENERATION", "NETWORK", "MOVED", "PACKAGES",
    "LABELS",
)  # fmt: skip
_SESSION_COLUMNS = 5  # the others with --wide
_PROCESS_HEADER = ("PROCESS", "PID", "STATE", "STARTED", "TERMINAL", "COMMAND")


def show(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Lists what the options name. Returns the exit code. Raises ExecutorClientError."""
    if options.session is None:
        sessions = sorted(client.list_sessions(), key=lambda info: info.create_time)
        ids = [info.session_id for info in sessions]
        table = [_SESSION_HEADER, *(_session_row(info, full=options.full) for info in sessions)]
        if not (options.wide or options.full):
            table = [row[:_SESSION_COLUMNS] for row in table]
    else:
        processes = sorted(find_session(client, options.session).processes.list(), key=lambda info: info.start_time)
        ids = [info.process_id for info in processes]
        table = [_PROCESS_HEADER, *(_process_row(info, full=options.full) for info in processes)]
    if options.json:
        console.show_json(sessions if options.session is None else processes)
    else:
        console.show_lines(ids if options.quiet else aligned(table))
    return EXIT_SUCCEEDED


def _session_row(info: SessionInfo, *, full: bool) -> tuple[str, ...]:
    labels = ",".join(f"{key}={value}" for key, value in sorted(info.labels.items()))
    state = f"{info.state.value} ({info.lost_reason})" if info.lost_reason else info.state.value
    session_id = info.session_id if full else short_id(info.session_id, _ID_DIGITS)
    left_s = max(0, int((info.expire_time - datetime.now(UTC)).total_seconds()))
    cells = (session_id, info.name or "-", _cut(state, full=full), info.image, f"in {left_s} s", info.backend)
    network = _cut(", ".join(info.network) or "none", full=full)
    moved = f"{info.network_usage.sent_bytes + info.network_usage.received_bytes:,} B" if info.network else "-"
    packages = _cut(", ".join(info.packages) or "-", full=full)
    more = (info.python_version, str(info.generation), network, moved, packages)
    return (*cells, *more, _cut(labels, full=full))


def _process_row(info: ProcessInfo, *, full: bool) -> tuple[str, ...]:
    started_s = max(0, int((datetime.now(UTC) - info.start_time).total_seconds()))
    process_id = info.process_id if full else info.process_id[:_ID_DIGITS]
    command = _cut(shlex.join(info.argv), full=full)
    return (process_id, str(info.pid), _state(info), f"{started_s} s ago", "yes" if info.has_pty else "no", command)


def _state(info: ProcessInfo) -> str:
    result = info.result
    if result is None:
        return "running"
    match result.outcome:
        case "exited":
            return f"exited {result.exit_code}"
        case "signalled":
            return f"signal {result.signal}"
        case outcome:
            return outcome


def _cut(text: str, *, full: bool) -> str:
    return text if full or len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 1]}…"
