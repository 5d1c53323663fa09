"""Importing ahead, without a sandbox: its reports, and its end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from executor_server.guest.interpreter.preload import import_ahead
from executor_server.guest.wire.link_messages import Importing, LinkMessage, NotImported

HANG = """\
import sys
from executor_server.guest.interpreter import preload
preload.MODULE_TIME_S = 0.05
sys.path.insert(0, sys.argv[1])
preload.import_ahead(["colorsys", "hangs"], lambda message: print(message.name, flush=True))
"""


def test_it_names_each_module_before_it_and_those_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exits_ahead.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    handler = signal.getsignal(signal.SIGALRM)
    reported: list[LinkMessage] = []
    import_ahead(["exits_ahead", "missing.ahead", "colorsys"], reported.append)
    signal.signal(signal.SIGALRM, handler)
    assert reported == [
        Importing(name="exits_ahead"),
        NotImported(name="exits_ahead", why="SystemExit"),
        Importing(name="missing.ahead"),
        NotImported(name="missing.ahead", why="ModuleNotFoundError"),
        Importing(name="colorsys"),
    ]


def test_a_module_that_takes_too_long_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("while True:\n    pass")
    ended = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=30.0, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGALRM, "colorsys\nhangs\n")
