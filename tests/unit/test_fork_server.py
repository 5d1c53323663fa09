"""A fork of the server is what the program would be: its arguments, output, environment, directory and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.support import fork_server
from tests.support.fork_server import Forked, start_daemon
from tests.support.leftovers import snapshot

WAIT_S = 60.0


@pytest.fixture
def output(tmp_path: Path) -> Iterator[IO[bytes]]:
    with (tmp_path / "output").open("wb") as file:
        yield file


def said(output: IO[bytes]) -> str:
    return Path(str(output.name)).read_text()


def own(**more: str) -> Mapping[str, str]:
    return {**os.environ, **more}


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["--help"], 0), (["nothing"], 2)])
def test_a_command_says_and_ends_as_the_program(arguments: list[str], status: int, output: IO[bytes]) -> None:
    forked = start_daemon(arguments, own(), output)
    assert isinstance(forked, Forked)
    assert forked.wait(WAIT_S) == forked.poll() == forked.returncode == status
    command = [sys.executable, "-m", "executor_server", *arguments]
    program = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (said(output), status) == (program.stdout + program.stderr, program.returncode)


def test_a_fork_has_the_environment_and_the_directory_of_its_order(
    tmp_path: Path, output: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text("pool.size = 7\n")
    asked = ["print-config", "--config", "c.toml"]
    assert start_daemon(asked, own(EXECUTOR_STATE_DIR="/somewhere/s"), output).wait(WAIT_S) == 0
    assert "size = 7" in said(output)
    assert "/somewhere/s" in said(output)


def test_a_fork_that_lives_is_a_leftover_and_its_server_is_none(output: IO[bytes], tmp_path: Path) -> None:
    start_daemon(["--version"], own(), output).wait(WAIT_S)
    before = snapshot(host=False)
    forked = start_daemon(["serve", "--state-dir", str(tmp_path / "s")], own(), output)
    assert snapshot(host=False).processes - before.processes >= {forked.pid}
    assert fork_server.server_pid() not in snapshot(host=False).processes
    with pytest.raises(subprocess.TimeoutExpired):
        forked.wait(0.0)
    assert forked.poll() is None
    forked.kill()
    assert forked.wait(WAIT_S) == -signal.SIGKILL
    assert not psutil.pid_exists(forked.pid), "the server has reaped it"
    forked.kill()


def test_who_sets_what_an_interpreter_reads_at_its_start_gets_a_program(output: IO[bytes]) -> None:
    program = start_daemon(["--version"], own(PYTHONVERBOSE="1"), output)
    assert isinstance(program, subprocess.Popen)
    assert program.wait(WAIT_S) == 0
    assert "import executor_server" in said(output).replace("'", "")
