"""The tests' own internet as a process of its own, and daemons whose sessions may reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Served, serving
from benchmarks.references import Unmeasurable

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = "test-internet.example"
SITE = f"files.{SUFFIX}"
SECRET_SITE = f"api.{SUFFIX}"
"""A host for which requests get a header, so that the proxy terminates TLS."""
RAW = f"raw.{SUFFIX}"
RAW_PORT = 9000
CONNECTIONS = 64
"""Connections of one session at a time."""
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Internet:
    address: str
    ca_file: str
    config: str  # the section of executor.toml for daemons that use it


@contextmanager
def running_internet() -> Iterator[Internet]:
    """Starts it. Raises Unmeasurable if it can't be started here."""
    command = [sys.executable, "-m", "tests.support.internet"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        if not line:
            raise Unmeasurable(process.stderr.read().strip().splitlines()[-1])
        try:
            yield Internet(**json.loads(line))
        finally:
            process.stdin.close()
            process.wait(_STOP_TIMEOUT_S)


@contextmanager
def networked(internet: Internet, backend: str = "local") -> Iterator[Served]:
    """A daemon whose clients may ask for every host of the internet."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        policy, secret = Path(directory) / "policy.toml", Path(directory) / "secret"
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write("a-token-for-benchmarks")
        policy.write_text(
            f"""
            default = "networked"
            [profiles.networked.network]
            allowed = ["*.{SUFFIX}", "*.{SUFFIX}:{RAW_PORT}"]
            max_connections = {CONNECTIONS}
            max_new_connections_per_minute = 1_000_000
            max_received_bytes = {2**50}
            max_sent_bytes = {2**50}
            [[profiles.networked.network.secrets]]
            host = "{SECRET_SITE}"
            header = "Authorization"
            value = "Bearer ${{bot}}"
            """
        )
        settings = f"""
            policy.file = {json.dumps(str(policy))}
            {internet.config}
            secrets = {{ bot = {json.dumps(str(secret))} }}
            """
        with serving(backend, settings) as served:
            yield served
