"""Logs at a terminal, and elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

CODE = r"""
import structlog
from executor_server.core.logs import configure
configure("info", "auto")
log = structlog.get_logger()
log.info("made", name="a\x1b[2Jb\nc", hosts=["\x1b[5m"], label="\u202e")
try:
    raise ValueError("x\x9by")
except ValueError:
    log.exception("failed")
"""


def test_a_terminal_gets_lines_for_people_and_no_control_characters_of_clients() -> None:
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, "-c", CODE], stderr=theirs, timeout=60, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "made" in shown and "Traceback" in shown and not shown.startswith("{")
    assert "[2J" in shown and "\x1b[2J" not in shown and "\x1b[5m" not in shown
    assert not {"\x9b", "\u202e"} & set(shown)


def test_a_pipe_gets_json() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert all(line.startswith("{") for line in done.stderr.splitlines())
