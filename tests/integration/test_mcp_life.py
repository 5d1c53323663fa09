"""The start and end of `executor mcp`: only the protocol on stdout, and no session outlives its connection."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClient
from executor_client.cli import main
from tests.support.daemon import Daemon, running_daemon
from tests.support.mcp_host import COMMAND, connected, environment, text_of
from tests.support.mcp_sdk import is_error
from tests.support.polling import eventually
from tests.support.rounds import usual

TIMEOUT_S = 60.0
INITIALIZE = {
    "protocolVersion": "2025-06-18",
    "capabilities": {},
    "clientInfo": {"name": "test", "version": "1"},
}
ENDLESS = "print('running', flush=True)\nwhile True: pass"


class RawHost:
    """A host that writes and reads lines itself, without the SDK."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._number = 0

    def send(self, method: str, params: dict[str, Any]) -> None:
        self._number += 1
        self.write({"jsonrpc": "2.0", "id": self._number, "method": method, "params": params})

    def write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Returns the next message. Any other text on stdout fails here."""
        assert self.process.stdout is not None
        message = json.loads(self.process.stdout.readline())
        assert message["jsonrpc"] == "2.0"
        return dict(message)

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the last request, without the notifications before it."""
        while "method" in (message := self.read()):
            pass
        assert message["id"] == self._number
        return message

    def initialize(self) -> None:
        self.send("initialize", INITIALIZE)
        assert self.answer()["result"]["serverInfo"]["name"] == "remote-executor"
        self.write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def start(self, code: str) -> None:
        """Runs code, and returns once it has printed."""
        self.send("tools/call", {"name": "run_python", "arguments": {"code": code}})
        assert self.read()["method"] == "notifications/message"


@contextmanager
def raw_host(env: dict[str, str], *options: str) -> Iterator[RawHost]:
    command = [sys.executable, *COMMAND, "mcp", *options]
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            yield RawHost(process)
        finally:
            process.kill()


def close_stdin(host: RawHost) -> None:
    assert host.process.stdin is not None
    host.process.stdin.close()


def close_both(host: RawHost) -> None:
    """Closes both sides, as a dying host does."""
    assert host.process.stdin is not None and host.process.stdout is not None
    host.process.stdout.close()
    host.process.stdin.close()


def close_stdout(host: RawHost) -> None:
    """Closes the reading side while stdin stays open: the next answer meets the broken pipe."""
    assert host.process.stdout is not None
    host.process.stdout.close()
    host.send("tools/list", {})


def terminate(host: RawHost) -> None:
    host.process.send_signal(signal.SIGTERM)


ENDS = [(close_stdin, {0}), (terminate, {0}), (close_both, {0, 1}), (close_stdout, {1})]


@pytest.mark.parametrize(
    ("end", "exit_codes"),
    usual(ENDS, but=ENDS[1:]),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_end_of_the_connection_ends_what_runs_and_the_sessions(
    daemon: Daemon, client: ExecutorClient, end: Callable[[RawHost], None], exit_codes: set[int]
) -> None:
    with raw_host(environment(daemon)) as host:
        host.initialize()
        host.start(ENDLESS)
        assert [info.labels["client"] for info in client.list_sessions()] == ["executor-mcp"]
        end(host)
        assert host.process.wait(TIMEOUT_S) in exit_codes
        assert host.process.stderr is not None and host.process.stderr.read() == ""
        assert client.list_sessions() == []


def test_a_killed_server_leaves_its_sessions_to_their_idle_time(daemon: Daemon, client: ExecutorClient) -> None:
    with raw_host(environment(daemon), "--limit", "idle_time_s=1") as host:
        host.initialize()
        host.start("print('running')")
        assert host.read()["result"]["isError"] is False
        host.process.kill()
        host.process.wait()
    assert eventually(lambda: client.list_sessions() == [])


def test_messages_that_are_none_do_no_harm(daemon: Daemon) -> None:
    with raw_host(environment(daemon)) as host:
        assert host.process.stdin is not None
        host.process.stdin.write('not JSON\n{"jsonrpc": "2.0"}\n[]\n\n{"id": 1}\n\0\n')
        host.initialize()
        host.send("tools/call", {"name": "no_such_tool", "arguments": {}})
        assert host.answer()["result"]["isError"] is True
        host.send("tools/call", {"name": "run_python", "arguments": {"code": "6 * 7"}})
        assert host.answer()["result"]["content"][0]["text"] == "Value: 42"
        close_stdin(host)
        assert host.process.wait(TIMEOUT_S) == 0


def test_a_message_past_the_limit_ends_the_connection_and_says_why(daemon: Daemon) -> None:
    with raw_host(environment(daemon)) as host:
        assert host.process.stdin is not None and host.process.stderr is not None
        host.initialize()
        piece = "x" * (1 << 20)
        with pytest.raises(BrokenPipeError):
            for _ in range(80):
                host.process.stdin.write(piece)
        assert host.process.wait(TIMEOUT_S) == 0
        assert "a message of the host has more than 67,108,864 bytes" in host.process.stderr.read()


def test_a_daemon_that_is_not_there_is_said_at_each_call_and_found_when_it_is() -> None:
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    state_dir = directory / "s"
    env = {**os.environ, "EXECUTOR_STATE_DIR": str(state_dir)}
    state_dir.mkdir(mode=0o700)
    (state_dir / "token").touch(0o600)
    (state_dir / "token").write_text(secrets.token_urlsafe(32))
    with connected(env) as host:
        calls = [host.start("run_python", code="1"), host.start("list_files"), host.start("get_policy")]
        for call in calls:
            assert is_error(call.result())
            assert f"no daemon answers at unix:{state_dir}" in text_of(call.result())
        assert [text for _, text in host.progress if text is not None and text.startswith("waiting for the daemon")]
        with running_daemon(directory):
            assert "Value: 2" in host.run("x = 1\nx + 1")
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mcp", "--limit", "nonsense=1"], "no such limits: nonsense. There are wall_time_s"),
        (["mcp", "--limit", "wall_time_s=long"], "limits.wall_time_s cannot be 'long'"),
        (["mcp", "--limit", "wall_time_s"], "argument --limit"),
        (["mcp", "--max-sessions", "0"], "argument --max-sessions"),
        (["--address", "example.org:1", "mcp"], "is not on this machine, so the token would be sent unprotected"),
        (["mcp"], "executor: no token: "),
        (["mcp", "--http", "8899"], "argument --http"),
        (["--token", "t", "mcp", "--http", "127.0.0.1:0"], "each request brings its own token"),
        (["--address", "example.org:1", "mcp", "--http", "127.0.0.1:0"], "is not on this machine, so the token"),
        (["mcp", "--http", "0.0.0.0:0"], "pass --public-url https://HOST/mcp"),
        (["mcp", "--http", "0.0.0.0:0", "--public-url", "http://a.org/mcp"], "tokens would be sent unprotected"),
        (["mcp", "--http", "0.0.0.0:0", "--public-url", "a.org"], "--public-url 'a.org' is not a URL"),
        (["mcp", "--http", "127.0.0.1:0", "--http-cert", "x"], "a certificate needs its key"),
        (["mcp", "--http", "127.0.0.1:0", "--http-cert", "/no", "--http-key", "/no"], "/no and /no can't be used"),
        (["mcp", "--http", "192.0.2.1:1", "--public-url", "https://a.org"], "can't listen at 192.0.2.1:1"),
    ],
)
def test_what_cannot_be_served_is_said_before_anything_is(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as exited:  # argparse's, or ours
        sys.exit(main(arguments))
    out, err = capsys.readouterr()
    assert (exited.value.code, out) == (2, "")
    assert any(said in line for line in err.splitlines()) and len(err.splitlines()) <= 2


def test_without_the_sdk_it_is_said_what_to_install(daemon: Daemon) -> None:
    program = "import sys; sys.modules['mcp'] = None; from executor_client.cli import main; sys.exit(main(['mcp']))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(daemon), text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "executor: the MCP server needs the official SDK: pip install 'remote-executor[mcp]'\n"
