"""Refusals of requests for sessions: failures of a backend, and no room, with the caller's own sessions listed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from executor_server.core import (
    BackendFull,
    EnvironmentFailed,
    ExecutorError,
    ImageNotReady,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    SandboxSpec,
    SpecUnsupported,
    TooManySessions,
    Unavailable,
)
from executor_server.sessions.session import Session

# The list of sessions travels in the trailers of a call, which have room for about a thousand bytes.
_MAX_LISTED = 8
_MAX_LABEL_CHARS = 24
_RETRY_AFTER_S = 2.0
_HOW_TO_END = "End one: `executor rm SESSION`, `executor rm --all`, or session.close()"

_log = structlog.get_logger(__name__)


def refusal_of(failure: SandboxFailure, spec: SandboxSpec) -> ExecutorError:
    """Returns the refusal of a request for such a sandbox or its environment. Logs failures with internal texts."""
    match failure:
        case EnvironmentFailed():
            return PreconditionFailed(Reason.ENVIRONMENT_FAILED, str(failure))
        case ImageNotReady():
            return Unavailable(Reason.IMAGE_NOT_READY, str(failure), failure.retry_after_s, progress=failure.progress)
        case BackendFull():
            _log.warning("backend_full", image=spec.image, error=str(failure), retry_after_s=failure.retry_after_s)
            message = "all sandboxes are in use; end a session, or try again later"
            return ResourceExhausted(Reason.BACKEND_FULL, message, failure.retry_after_s)
        case SpecUnsupported():
            return Unavailable(Reason.BACKEND_UNAVAILABLE, str(failure))
        case _:
            _log.error("sandbox_not_made", image=spec.image, error=str(failure))
            message = "the daemon could not create a sandbox; its log has the reason; try again later"
            return Unavailable(Reason.BACKEND_UNAVAILABLE, message)


def no_room(max_sessions: int, own: Sequence[Session]) -> ResourceExhausted:
    """Returns the refusal of a daemon that has its maximum of sessions."""
    message = f"the daemon has {max_sessions} sessions, its maximum; end one, or try again later"
    return with_own_sessions(TooManySessions(Reason.TOO_MANY_SESSIONS, message, retry_after_s=_RETRY_AFTER_S), own)


def with_own_sessions(refusal: TooManySessions, own: Sequence[Session]) -> ResourceExhausted:
    """Returns the refusal with the caller's own sessions added, oldest first."""
    return TooManySessions(refusal.reason, f"{refusal.message}. {_listing(own)}", refusal.retry_after_s)


def _listing(own: Sequence[Session]) -> str:
    if not own:
        return "None of them is yours"
    oldest_first = sorted(own, key=lambda session: session.create_time_s)
    listed = [_line(session) for session in oldest_first[:_MAX_LISTED]]
    more = f", and {len(own) - _MAX_LISTED} more" if len(own) > _MAX_LISTED else ""
    return f"Yours: {', '.join(listed)}{more}. {_HOW_TO_END}"


def _line(session: Session) -> str:
    label = next(iter(session.spec.labels.items()), None)
    shown = "" if label is None else f", {_printable(f'{label[0]}={label[1]}')}"
    return f"{session.session_id} ({session.state}, {_age(time.time() - session.create_time_s)} old{shown})"


def _printable(text: str) -> str:
    """Makes a client's text safe for a terminal: no control characters, and short."""
    shown = "".join(each if each.isprintable() else "?" for each in text[: _MAX_LABEL_CHARS + 1])
    return shown if len(shown) <= _MAX_LABEL_CHARS else f"{shown[:_MAX_LABEL_CHARS]}…"


def _age(age_s: float) -> str:
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if age_s >= unit_s:
            return f"{age_s / unit_s:.0f} {unit}"
    return f"{max(age_s, 0):.0f} s"
