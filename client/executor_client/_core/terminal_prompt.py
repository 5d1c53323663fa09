"""Asks the person at the terminal of this process for the decision on an approval.

It uses the terminal itself, wherever stdin, stdout and stderr lead. Text that was typed before the question is not an
answer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select

from executor_client._core.limits import APPROVAL_ENDED_CHECK_S
from executor_client._core.session_base import short_id
from executor_client.approvals import Approval, ApprovalDecision, ApprovalKind

_log = logging.getLogger(__name__)

_TERMINAL = "/dev/tty"
_LINE_BYTES_MAX = 1_024
_QUESTION = "  [o]nce, for the [s]ession, or [d]eny? "
_ANSWERS: dict[str, ApprovalDecision] = {
    **dict.fromkeys(("o", "once"), "once"),
    **dict.fromkeys(("s", "session"), "session"),
    **dict.fromkeys(("d", "deny", "n", "no"), "deny"),
}
_WANTED = {
    ApprovalKind.HOST: "connect to",
    ApprovalKind.PACKAGE: "install",
    ApprovalKind.TOOL: "call the tool",
    ApprovalKind.IMPORT: "import",
    ApprovalKind.OTHER: "use",
}


def has_terminal() -> bool:
    """True if this process has a terminal to ask in, and is in its foreground."""
    try:
        terminal = os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()  # a process in the background would be stopped
    except OSError:
        return False
    finally:
        os.close(terminal)


def ask_in_terminal(approval: Approval) -> ApprovalDecision:
    """Asks the person at the terminal, as an `on_approval`. Denies without a terminal, and says so in the log.

    Returns when the request ends before the person answers.
    """
    if not has_terminal():
        _log.warning("denied, because this process has no terminal to ask in: %s", approval)
        return "deny"
    terminal = os.open(_TERMINAL, os.O_RDWR | os.O_NOCTTY)
    try:
        return _ask(terminal, approval)
    finally:
        os.close(terminal)


def _ask(terminal: int, approval: Approval) -> ApprovalDecision:
    session = f"session {short_id(approval.session_id)}" if approval.session_id else "a new session"
    call = f"({approval.detail})" if approval.kind is ApprovalKind.TOOL else ""
    _write(
        terminal,
        f"\n[approval] {session} of {approval.tenant} asks to {_WANTED[approval.kind]}: {approval.shown}{call}\n"
        f"  rule: {approval.rule}; denied in {approval.left_s:.0f} s without an answer\n",
    )
    _drop_typed(terminal)
    _write(terminal, _QUESTION)
    while (line := _line(terminal, approval)) is not None:
        answer = _ANSWERS.get(line.strip().lower() if line else "deny")  # no line: Ctrl-D
        if answer is not None:
            _write(terminal, f"  {'denied' if answer == 'deny' else f'approved; {approval.policy_change}'}\n")
            return answer
        _write(terminal, _QUESTION)
    _write(terminal, "\n  no answer is needed any more: it was decided, withdrawn or denied\n")
    return "deny"


def _line(terminal: int, approval: Approval) -> str | None:
    """Returns a line that was typed, empty at the end of the input; None if the request ends first."""
    while approval.is_waiting:
        ready, _, _ = select.select([terminal], [], [], APPROVAL_ENDED_CHECK_S)
        if ready:
            return os.read(terminal, _LINE_BYTES_MAX).decode("utf-8", "replace")
    return None


def _drop_typed(terminal: int) -> None:
    import termios  # not on every platform, but where there is a /dev/tty

    with contextlib.suppress(termios.error):
        termios.tcflush(terminal, termios.TCIFLUSH)


def _write(terminal: int, text: str) -> None:
    """Writes text, which is printable, like all text of an `Approval`."""
    data = text.encode("ascii", "backslashreplace")
    while data:
        data = data[os.write(terminal, data) :]
