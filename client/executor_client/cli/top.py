"""`executor top`: the sessions of the daemon as they change, the busy ones first.

On a terminal it fills the screen until "q" or an interrupt. Otherwise it prints one table.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import types_pb2 as pb
from executor_client._core.limits import WATCH_AGAIN_S
from executor_client._core.requests import made
from executor_client._core.session_base import short_id
from executor_client._core.session_table import SessionTable
from executor_client._core.terminal import aligned
from executor_client.cli import EXIT_SUCCEEDED
from executor_client.cli.console import Console
from executor_client.client import ExecutorClient
from executor_client.errors import AuthorizationError, CallTimeoutError, ExecutorClientError, UnavailableError
from executor_client.replays.timeline import enum_text

DRAW_S = 1.0
STATUS_S = 2.0
"""Seconds that the daemon has for its own state."""
ENDED_S = 600.0
"""Seconds for which an ended session is listed."""

_ID_DIGITS = 12
_CELL_CHARS = 16
_HEADER = ("SESSION", "TENANT", "STATE", "STEPS", "CPU", "MEMORY", "OUTPUT", "NETWORK", "AGE", "LAST")
_BEGIN = "\x1b[?1049h\x1b[?25l"  # the alternate screen, no cursor
_END = "\x1b[?25h\x1b[?1049l"


def show(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Shows the sessions. Returns the exit code. Raises ExecutorClientError, AuthorizationError without the right."""
    client.get_policy()  # raises the reason if no daemon answers
    watch = _Watch(client, options.tenant)
    watch.start()
    status = _Status(client)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        console.show_lines(_lines(watch, status.read(), sys.maxsize))
        return EXIT_SUCCEEDED
    with _screen(), contextlib.suppress(KeyboardInterrupt):
        while watch.problem is None:
            size = shutil.get_terminal_size()
            lines = _lines(watch, status.read(), size.lines - 1)
            shown = [line[: size.columns].ljust(size.columns) for line in lines]
            shown += [" " * size.columns] * (size.lines - 1 - len(shown))
            sys.stdout.write("\x1b[H" + "\r\n".join(shown) + "\x1b[J")
            sys.stdout.flush()
            if _quits(DRAW_S):
                return EXIT_SUCCEEDED
    if watch.problem is not None:
        raise watch.problem
    return EXIT_SUCCEEDED


class _Watch:
    """The sessions that a thread keeps up to date."""

    def __init__(self, client: ExecutorClient, tenant: str) -> None:
        self._client, self._request = client, made(admin_pb.WatchSessionsRequest, tenant=tenant)
        self._lock = threading.Lock()
        self._table = SessionTable()
        self._is_complete = threading.Event()
        self.is_away = False
        self.problem: ExecutorClientError | None = None
        """The error that ended the watch, such as a refusal by the daemon."""

    def start(self) -> None:
        """Returns when all sessions are known. Raises ExecutorClientError."""
        threading.Thread(target=self._run, name="executor-top", daemon=True).start()
        self._is_complete.wait()
        if self.problem is not None:
            raise self.problem

    def views(self) -> list[admin_pb.SessionView]:
        with self._lock:
            return list(self._table.views.values())

    def _run(self) -> None:
        while self.problem is None:
            try:
                self._read()
            except UnavailableError as error:
                if error.reason == "CLIENT_CLOSED" or not self._is_complete.is_set():
                    self.problem = error
            except ExecutorClientError as error:
                self.problem = error
            self.is_away = True
            if self.problem is None:
                time.sleep(WATCH_AGAIN_S)
        self._is_complete.set()

    def _read(self) -> None:
        self._table.begin()
        with contextlib.closing(self._client._transport.read(self._request, math.inf)) as messages:
            for message in messages:
                with self._lock:
                    is_known = self._table.take(message)
                if is_known:
                    self.is_away = False
                    self._is_complete.set()


class _Status:
    """The daemon's state, for callers that may read it."""

    def __init__(self, client: ExecutorClient) -> None:
        self._client = client
        self._is_refused = False

    def read(self) -> admin_pb.GetStatusResponse | None:
        """Returns the state; None for a viewer, and while no daemon answers."""
        if self._is_refused:  # each refusal is in the audit log: a viewer is refused once, not each second
            return None
        try:
            status: admin_pb.GetStatusResponse = self._client._transport.once(admin_pb.GetStatusRequest(), STATUS_S)
        except AuthorizationError:
            self._is_refused = True
            return None
        except (UnavailableError, CallTimeoutError):
            return None
        return status


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


def _lines(watch: _Watch, status: admin_pb.GetStatusResponse | None, most: int) -> list[str]:
    now_s = time.time()
    views = watch.views()
    there = [view for view in views if not view.HasField("end_time")]
    ended = [view for view in views if view.HasField("end_time") and now_s - view.end_time.seconds < ENDED_S]
    there.sort(key=lambda view: (not _is_busy(view), -view.use.cpu_time_s, view.owned.session.session_id))
    ended.sort(key=lambda view: -view.end_time.seconds)
    head = [*_head(there, status), *(["the daemon does not answer; this is from before"] if watch.is_away else []), ""]
    rows = [_row(view, now_s) for view in (*there, *ended)][: max(0, most - len(head) - 1)]
    return [*head, *aligned([_HEADER, *rows])][:most]


def _head(there: Sequence[admin_pb.SessionView], status: admin_pb.GetStatusResponse | None) -> list[str]:
    busy = sum(map(_is_busy, there))
    if status is None:
        return [f"sessions {len(there)}, busy {busy}"]
    used_bytes = status.memory_bytes - status.available_memory_bytes
    warm = sum(kind.depth for kind in status.pool)
    return [
        f"sessions {len(there)} of {status.max_sessions}, busy {busy}, warm {warm}, approvals {status.approvals}"
        f"{', draining' if status.draining else ''}",
        f"load {status.load:.2f} on {status.cpus} CPUs, memory {_size(used_bytes)} of {_size(status.memory_bytes)}",
    ]


def _is_busy(view: admin_pb.SessionView) -> bool:
    return view.owned.session.state == pb.SESSION_STATE_BUSY


def _row(view: admin_pb.SessionView, now_s: float) -> tuple[str, ...]:
    session, use = view.owned.session, view.use
    is_over = view.HasField("end_time")
    end_s = view.end_time.seconds if is_over else now_s
    outcome = enum_text(pb.Outcome, view.last_outcome, "OUTCOME_") if view.last_outcome else "-"
    return (
        _cut(session.name or short_id(session.session_id, _ID_DIGITS)),
        _cut(view.owned.tenant),
        "ended" if is_over else enum_text(pb.SessionState, session.state, "SESSION_STATE_"),
        str(use.executions),
        f"{use.cpu_time_s:.1f}s",
        _size(use.peak_memory_bytes),
        _size(use.output_bytes),
        _size(use.network.sent_bytes + use.network.received_bytes),
        _age(end_s - session.create_time.seconds),
        view.end_reason if is_over else outcome,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 1]}…"


def _size(size_bytes: float) -> str:
    units = iter("BKMGT")
    unit = next(units)
    while size_bytes >= 1000 and unit != "T":
        size_bytes, unit = size_bytes / 1024, next(units)
    return f"{size_bytes:.0f}{unit}" if unit == "B" or size_bytes >= 10 else f"{size_bytes:.1f}{unit}"


def _age(seconds: float) -> str:
    seconds = max(0, int(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02}s"
    return f"{seconds // 3600}h{seconds // 60 % 60:02}m"


# ---------------------------------------------------------------------------------------------------------------------
# The terminal


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Uses the terminal's alternate screen, and reads keys one by one without showing them."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    sys.stdout.write(_BEGIN)
    try:
        yield
    finally:
        sys.stdout.write(_END)
        sys.stdout.flush()
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(time_s: float) -> bool:
    """Waits for a key. Returns True for "q", and when there is no more input."""
    ready, _, _ = select.select([sys.stdin], [], [], time_s)
    return bool(ready) and os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b"")
