"""A console to be measured: a process of its own with defaults, next to a daemon."""

from __future__ import annotations

import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.daemon import START_TIMEOUT_S, STOP_TIMEOUT_S, Daemon
from tests.support.free_ports import free_port


@contextmanager
def running_console(daemon: Daemon) -> Iterator[str]:
    """Yields its one-time link."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory, tempfile.TemporaryFile() as errors:
        token_file = Path(directory) / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(daemon.token)
        command = [sys.executable, "-m", "executor_server", "console", "--state-dir", directory]
        command += ["--listen", f"127.0.0.1:{free_port()}", "--token-file", str(token_file)]
        command += ["--daemon", daemon.unix_address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            try:
                assert process.stdout is not None
                ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
                link = re.search(r"http://\S+", process.stdout.readline() if ready else "")
                if link is None:
                    raise RuntimeError("the console did not start")
                yield link[0]
            finally:
                process.terminate()
                process.wait(STOP_TIMEOUT_S)
