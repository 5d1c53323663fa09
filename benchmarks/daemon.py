"""Daemons to be measured: each a process of its own with defaults, or a few settings, on a directory of its own."""

from __future__ import annotations

import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor_client import ExecutorClient

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
_LOG_TAIL_CHARS = 2000


@dataclass(frozen=True)
class Daemon:
    """A daemon that listens."""

    pid: int
    unix_address: str
    tcp_address: str
    token: str
    start_s: float
    """From the start of its process until it announced that it listens."""

    @property
    def lives(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def client(self, address: str | None = None) -> ExecutorClient:
        return ExecutorClient(address or self.unix_address, token=self.token)


class DaemonHome:
    """A directory for one daemon at a time; each takes over from the one before."""

    def __init__(self, directory: Path, backend: str, settings: str) -> None:
        # Short names: that of a Unix socket has at most 107 bytes.
        self._state_dir, self._log, config = directory / "s", directory / "log", directory / "c.toml"
        config.write_text(settings)
        self._command = [sys.executable, "-m", "executor_server", "serve", "--config", str(config)]
        self._command += ["--state-dir", str(self._state_dir), "--backend", backend]
        self._process: subprocess.Popen[str] | None = None
        self._was_killed = False

    def start(self) -> Daemon:
        """Raises RuntimeError with the end of its log when it does not start."""
        assert self._process is None, "one runs already"
        socket = f"unix:{self._state_dir / 'executor.sock'}"
        began_s = time.perf_counter()
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*self._command, "--listen", socket, "--listen", "127.0.0.1:0"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._was_killed = False
        tcp_address = self._announced(self._process)
        start_s = time.perf_counter() - began_s
        token = (self._state_dir / "token").read_text().strip()
        return Daemon(self._process.pid, socket, tcp_address, token, start_s)

    def kill(self) -> None:
        """Ends it in the middle of everything; what it made lives on."""
        self._ended(signal.SIGKILL)
        self._was_killed = True

    def stop(self) -> None:
        """Ends it in order. Raises RuntimeError with the end of its log when it does not end as it should."""
        status = self._ended(signal.SIGTERM)
        if status != 0:
            raise RuntimeError(f"the daemon ended with exit code {status}: {self._last_words()}")

    def close(self) -> None:
        """Leaves nothing: after a killed daemon, one more cleans up."""
        if self._was_killed:
            self.start()
        if self._process is not None:
            self.stop()

    def _announced(self, process: subprocess.Popen[str]) -> str:
        """The TCP address, from the line that the daemon prints once it accepts calls."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline() if ready else "")
        if found is None:
            self._ended(signal.SIGKILL)
            raise RuntimeError(f"the daemon did not start: {self._last_words()}")
        return found[0]

    def _ended(self, number: signal.Signals) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        with process:
            process.send_signal(number)
            try:
                return process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()

    def _last_words(self) -> str:
        return self._log.read_text()[-_LOG_TAIL_CHARS:]


@contextmanager
def daemon_home(backend: str, settings: str = "", *, parent: Path = Path("/tmp")) -> Iterator[DaemonHome]:
    """A place below `parent` for daemons with these settings, in TOML. At the end nothing of them is left."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as directory:
        home = DaemonHome(Path(directory), backend, settings)
        try:
            yield home
        finally:
            home.close()


@contextmanager
def running_daemon(backend: str, settings: str = "", *, parent: Path = Path("/tmp")) -> Iterator[Daemon]:
    """One daemon, from start to end."""
    with daemon_home(backend, settings, parent=parent) as home:
        yield home.start()
