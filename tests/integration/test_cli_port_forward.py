"""`executor port-forward`: a server in a session, reached from this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from executor_client import ExecutorClient
from tests.support.daemon import Daemon
from tests.support.fork_server import EXECUTOR, popen
from tests.support.polling import eventually

TIMEOUT_S = 60.0


@pytest.fixture
def environment(daemon: Daemon) -> dict[str, str]:
    return {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}


@contextmanager
def forwarding(environment: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [*EXECUTOR, "port-forward", *arguments]
    with popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content: bytes = response.read()
            return content
    except (urllib.error.URLError, ConnectionError):
        return b""


def test_page_of_a_session_is_fetched_until_the_interrupt(environment: dict[str, str], client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.put_file("index.html", b"made inside")
        session.processes.start(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"])
        with forwarding(environment, session.session_id, ":8000") as process:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            url = line.split()[0]
            assert line.endswith(" forwards to port 8000 of the session\n")
            assert eventually(lambda: fetch(url) == b"made inside")
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
            assert "[port 8000: " in process.stderr.read()
            assert fetch(url) == b""


def test_port_that_nothing_listens_on_is_said(environment: dict[str, str], client: ExecutorClient) -> None:
    with client.create_session() as session, forwarding(environment, session.session_id, ":8001") as process:
        assert process.stdout is not None and process.stderr is not None
        url = process.stdout.readline().split()[0]
        assert fetch(url) == b""
        assert process.stderr.readline() == "[Ctrl-C ends it]\n"
        assert process.stderr.readline().startswith("[port 8001: ")


def test_local_port_in_use_is_refused_in_one_line(environment: dict[str, str], client: ExecutorClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, client.create_session() as session:
        port = taken.getsockname()[1]
        with forwarding(environment, session.session_id, f"{port}:8000") as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, out, err.count("\n")) == (2, "", 1)
        assert f"can't listen on 127.0.0.1:{port}" in err
