"""A daemon that belongs to this process: `ExecutorClient.local()`.

It is the console program of the extra `server`, on a Unix socket in a temporary directory. It watches this process
through a pidfd, so it ends and removes its directory even if this process is killed.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import BinaryIO

from executor_client._core.local import LocalPath
from executor_client.errors import ConfigurationError

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0
_LOG_BYTES = 2_000
# These may belong to the user's other daemon.
_NOT_PASSED = ("EXECUTOR_ADDRESS", "EXECUTOR_CONFIG", "EXECUTOR_STATE_DIR", "EXECUTOR_TOKEN")


class LocalDaemon:
    """Starts a daemon, and waits until it serves. It ends with `close`, with this object and with this process.

    Raises ConfigurationError if it does not start.
    """

    def __init__(
        self, backend: str | None = None, config: LocalPath | None = None, policy: LocalPath | None = None
    ) -> None:
        self._directory = tempfile.mkdtemp(prefix="executor-")  # short: a socket's path has at most 107 bytes
        self.address = f"unix:{self._directory}/executor.sock"
        options = {"--backend": backend, "--config": config, "--policy": policy}
        command = [sys.executable, "-m", "executor_server", "serve", "--for-process", str(os.getpid())]
        command += ["--state-dir", self._directory, "--listen", self.address]
        command += [str(word) for pair in options.items() if pair[1] is not None for word in pair]
        with Path(self._directory, "log").open("w+b") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: value for name, value in os.environ.items() if name not in _NOT_PASSED},
                start_new_session=True,  # a Ctrl-C in this terminal is for this process
            )
            self.close = weakref.finalize(self, _stop, process, self._directory, os.getpid())
            try:
                self._wait(process, log)
                self.token = Path(self._directory, "token").read_text().strip()
            except BaseException:
                self.close()
                raise

    def _wait(self, process: subprocess.Popen[bytes], log: BinaryIO) -> None:
        """Waits for the line that the daemon prints when it is ready."""
        assert process.stdout is not None
        deadline, line = time.monotonic() + _START_TIMEOUT_S, b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                raise ConfigurationError(f"the daemon did not start within {_START_TIMEOUT_S:g} s: {_log_end(log)}")
            if not (piece := os.read(process.stdout.fileno(), 4096)):
                raise ConfigurationError(f"the daemon could not be started: {_log_end(log)}")
            line += piece


def _log_end(log: BinaryIO) -> str:
    # Read from the open file: a daemon that ends removes its directory.
    begin = max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES)
    text = os.pread(log.fileno(), _LOG_BYTES, begin).decode(errors="replace").strip()
    if "ModuleNotFoundError" in text:
        missing = text.rpartition("\n")[2]
        return f"its packages are missing ({missing}); pip install 'remote-executor[server]'"
    return f"{text}\n`executor-server check-host` shows what this machine needs"


def _stop(process: subprocess.Popen[bytes], directory: str, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child; the parent still needs the daemon
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
    shutil.rmtree(directory, ignore_errors=True)  # gone already, unless the daemon was killed
