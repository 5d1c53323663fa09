"""A gateway or a console to be measured: a process of its own with defaults, next to a daemon."""

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
def running_gateway(daemon: Daemon) -> Iterator[str]:
    """Yields its URL. The daemon's token is a key of it."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory,
        _running("gateway", daemon, "--state-dir", directory) as url,
    ):
        yield url


@contextmanager
def running_console(daemon: Daemon) -> Iterator[str]:
    """Yields its one-time link."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        token_file = Path(directory) / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(daemon.token)
        with _running("console", daemon, "--state-dir", directory, "--token-file", str(token_file)) as link:
            yield link


@contextmanager
def _running(name: str, daemon: Daemon, *options: str) -> Iterator[str]:
    """Yields the URL that it announces."""
    command = [sys.executable, "-m", "executor_server", name, *options]
    command += ["--listen", f"127.0.0.1:{free_port()}", "--daemon", daemon.unix_address]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
            url = re.search(r"http://\S+", process.stdout.readline() if ready else "")
            if url is None:
                raise RuntimeError(f"the {name} did not start")
            yield url[0]
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
