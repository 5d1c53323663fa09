"""Tries images with our guest, confined as agents' code is, to find failures that occur only in a sandbox.

A daemon of our own with the Docker backend runs the `probe.py` of each recipe in a sandbox of its image. Daemon and
client are started as commands, since neither imports the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from executor_server.daemon.cli.image_building.build import RECIPES, BuildFailure

START_TIMEOUT_S = 30.0
PROBE_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_TAIL_CHARS = 4_000


def probe_all(names: Sequence[str]) -> bool:
    """Tries each image and prints a line about it. Raises BuildFailure when there is no daemon to try them with."""
    with _daemon() as environment:
        return not [name for name in names if not _probe(name, environment)]


def _probe(name: str, environment: dict[str, str]) -> bool:
    began = time.monotonic()
    program = RECIPES / name / "probe.py"
    arguments = ["run", "--image", name, "--imports", "*", str(program)]
    tried = _client(environment, *arguments, timeout_s=PROBE_TIMEOUT_S)
    if tried.returncode == 0:
        print(f"probe: {name:8} does what it promises ({time.monotonic() - began:.1f} s)", flush=True)
        return True
    print(f"probe: {name} failed\n{tried.stdout}{tried.stderr}", file=sys.stderr)
    return False


@contextmanager
def _daemon() -> Iterator[dict[str, str]]:
    """Runs a daemon of our own for the block; yields the environment variables with which a client finds it."""
    # Short on purpose: the path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="executor-") as directory:
        state_dir, log = Path(directory) / "state", Path(directory) / "log"
        environment = {**os.environ, "EXECUTOR_STATE_DIR": str(state_dir)}
        for name in ("EXECUTOR_ADDRESS", "EXECUTOR_TOKEN", "EXECUTOR_CONFIG"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "executor_server", "serve", "--backend", "docker"]
        command += ["--listen", f"unix:{state_dir}/executor.sock"]
        with (
            log.open("w") as output,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            ) as process,
        ):
            try:
                _wait_until_ready(process, environment, log)
                yield environment
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], environment: dict[str, str], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        has_socket = (Path(environment["EXECUTOR_STATE_DIR"]) / "executor.sock").exists()
        if has_socket and _client(environment, "ps", timeout_s=START_TIMEOUT_S).returncode == 0:
            return
        time.sleep(_POLL_S)
    raise BuildFailure(f"no daemon to try the images with:\n{log.read_text(errors='replace')[-_TAIL_CHARS:]}")


def _client(environment: dict[str, str], *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executor_client.cli", *arguments]
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
