"""A gateway to be measured: a process of its own with defaults, next to a daemon."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.daemon import START_TIMEOUT_S, STOP_TIMEOUT_S, Daemon
from tests.support.free_ports import free_port


@contextmanager
def running_gateway(daemon: Daemon) -> Iterator[str]:
    """Yields its URL. The daemon's token is a key of it."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory, tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "executor_server", "gateway", "--state-dir", directory]
        command += ["--listen", f"127.0.0.1:{free_port()}", "--daemon", daemon.unix_address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout is not None
                ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
                words = process.stdout.readline().split() if ready else []
                if not words:
                    raise RuntimeError("the gateway did not start")
                yield words[-1]
            finally:
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
