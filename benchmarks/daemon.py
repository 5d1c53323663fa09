"""A daemon to be measured: a process of its own with everything at its defaults, on a directory of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor_client import ExecutorClient

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Daemon:
    pid: int
    unix_address: str
    tcp_address: str
    token: str

    def client(self, address: str | None = None) -> ExecutorClient:
        return ExecutorClient(address or self.unix_address, token=self.token)


@contextmanager
def running_daemon() -> Iterator[Daemon]:
    """Starts a daemon on the local backend, waits until it listens, stops it at the end.

    Raises RuntimeError with the end of its log when it does not start or does not stop as it should.
    """
    # A short path: the name of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        state_dir, log = Path(directory, "s"), Path(directory, "log")
        socket = f"unix:{state_dir / 'executor.sock'}"
        command = [sys.executable, "-m", "executor_server", "serve", "--state-dir", str(state_dir)]
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*command, "--listen", socket, "--listen", "127.0.0.1:0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "EXECUTOR_CONFIG": ""},
                text=True,
            )
        with process:
            try:
                tcp_address = _announced(process, log)
                token = (state_dir / "token").read_text().strip()
                yield Daemon(process.pid, socket, tcp_address, token)
            finally:
                _stop(process)
        if process.returncode != 0:
            raise RuntimeError(f"the daemon ended with exit code {process.returncode}: {log.read_text()[-2000:]}")


def _announced(process: subprocess.Popen[str], log: Path) -> str:
    """The TCP address, from the line that the daemon prints once it accepts calls."""
    assert process.stdout is not None
    select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if process.poll() is None else ""
    found = re.search(r"127\.0\.0\.1:\d+", line)
    if found is None:
        raise RuntimeError(f"the daemon did not start: {log.read_text()[-2000:]}")
    return found[0]


def _stop(process: subprocess.Popen[str]) -> None:
    """Asks it to end, which it does by itself; one that hangs is killed, and so has no exit code 0."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
