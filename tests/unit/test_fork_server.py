"""A fork of the server is what the program would be: its arguments, streams, environment, directory and end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import fork_server, rounds
from tests.support.fork_server import EXECUTOR, SERVER, Forked, is_forked, server_pid
from tests.support.leftovers import snapshot
from tests.support.screen import run_on_terminal

WAIT_S = 60.0
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def own(**more: str) -> Mapping[str, str]:
    return {**os.environ, **more}


@pytest.mark.parametrize("program", [SERVER, EXECUTOR])
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["nothing"]])
def test_a_command_says_and_ends_as_the_program(program: Sequence[str], arguments: list[str]) -> None:
    command = [*program, *arguments]
    with Forked(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as forked:
        said = forked.communicate(timeout=WAIT_S)
    assert forked.poll() == forked.returncode
    same = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (*said, forked.returncode) == (same.stdout, same.stderr, same.returncode)


def test_a_fork_has_the_environment_and_the_directory_of_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("pool.size = 7\n")
    said = fork_server.server("print-config", "--config", "c.toml", EXECUTOR_STATE_DIR="/somewhere/s").stdout
    assert "size = 7" in said
    assert "/somewhere/s" in said


def test_a_fork_reads_its_standard_input(tmp_path: Path) -> None:
    asked = [*EXECUTOR, "--address", f"unix:{tmp_path}/none", "--token", "x" * 43, "repl"]
    with Forked(asked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as forked:
        assert b"no daemon answers at unix:" in forked.communicate(b"1\n", WAIT_S)[0]
    assert forked.returncode == 2


def test_a_fork_on_a_terminal_knows_its_width() -> None:
    narrow, wide = (run_on_terminal([*EXECUTOR, "run", "--help"], own(), columns=width) for width in (60, 200))
    assert narrow.exit_code == wide.exit_code == 0
    assert len(narrow.lines) > len(wide.lines)


def test_a_fork_that_lives_is_a_leftover_and_its_server_is_none(tmp_path: Path) -> None:
    Forked([*SERVER, "--version"], **QUIET).wait(WAIT_S)
    before = snapshot(host=False)
    forked = Forked([*SERVER, "serve", "--state-dir", str(tmp_path / "s")], **QUIET)
    assert snapshot(host=False).processes - before.processes >= {forked.pid}
    assert server_pid() not in snapshot(host=False).processes
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.0)
    assert forked.poll() is None
    forked.kill()
    assert forked.wait(WAIT_S) == -signal.SIGKILL
    assert not psutil.pid_exists(forked.pid), "the server has reaped it"
    forked.kill()


def test_what_differs_from_the_servers_own_start_is_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [*SERVER, "--version"]
    monkeypatch.setattr(rounds, "ALL", False)
    assert is_forked(command, {"env": own(HOME="/"), "text": True})
    assert not is_forked(command, {"env": own(PYTHONVERBOSE="1")})
    assert not is_forked(command, {"user": 1})
    assert not is_forked(["true"], {})
    monkeypatch.setattr(rounds, "ALL", True)
    assert not is_forked(command, {"env": own(HOME="/"), "text": True})
