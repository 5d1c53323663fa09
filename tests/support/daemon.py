"""A real daemon as a process of its own, on a directory of its own and a Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_client import AuthenticationError, ExecutorClient, ExecutorClientError, UnavailableError
from executor_server.core.config import StateDir
from executor_server.policy.identity import Role, TokenFile
from tests.support.fork_server import SERVER, popen
from tests.support.leftovers import DAEMON_PREFIX
from tests.support.polling import eventually

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
# By then a daemon that has nothing to wait for has stopped.
HURRY_AFTER_S = 2.0

# State directories whose last daemon has stopped in order, and so has left no sandbox.
_swept: set[Path] = set()


@dataclass(frozen=True)
class Daemon:
    """A daemon that runs."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    log: Path

    @property
    def address(self) -> str:
        return f"unix:{self.state_dir / 'executor.sock'}"

    @property
    def token(self) -> str:
        return (self.state_dir / "token").read_text().strip()

    @property
    def access(self) -> dict[str, Any]:
        """The keyword arguments that a client connects with."""
        return {"address": self.address, "token": self.token}

    def client(self, **options: Any) -> ExecutorClient:
        return ExecutorClient(**self.access, **options)

    def new_token(self, tenant: str, *roles: Role) -> str:
        """A token as the command line makes it; the daemon knows it within a second."""
        _, secret = TokenFile(StateDir(self.state_dir).tokens_path).new(tenant, "default", roles=roles)
        return secret

    @contextmanager
    def client_of(self, tenant: str, **options: Any) -> Iterator[ExecutorClient]:
        """A client with a new token, once the daemon knows it."""
        with ExecutorClient(self.address, token=self.new_token(tenant), **options) as client:
            assert eventually(lambda: is_known(client))
            yield client

    def kill(self) -> None:
        """Ends it without a chance to clean up."""
        self.process.kill()
        self.process.wait()


@contextmanager
def running_daemon(directory: Path, *options: str, program: Sequence[str] = ()) -> Iterator[Daemon]:
    """Starts a daemon and waits until it answers; at the end it is asked to stop, and must.

    It is a fork of a process that has imported it (tests/support/fork_server.py), or this `program` with its arguments.

    When it was killed meanwhile, its sandboxes are still there, as they should be: another daemon on the same directory
    comes and goes, unless one has already, and ends them. `directory` must have a short name: the path of a Unix socket
    has at most 107 bytes.
    """
    state_dir, log = directory / "s", directory / "log"
    listen = f"unix:{state_dir / 'executor.sock'}"
    environment = {**os.environ, "EXECUTOR_STATE_DIR": str(state_dir)}
    command = [*(program or SERVER), "serve", "--listen", listen, *options]
    start = subprocess.Popen if program else popen
    with log.open("wb") as output:
        process = start(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    daemon = Daemon(process, state_dir, log)
    _swept.discard(state_dir)
    try:
        assert eventually(lambda: _answers(daemon), timeout_s=START_TIMEOUT_S), log.read_text()
        yield daemon
    finally:
        if daemon.process.returncode == -signal.SIGKILL:
            if state_dir not in _swept:
                with running_daemon(directory, *options) as sweeper:
                    _hurry(sweeper)
        else:
            _stop(daemon)
            _swept.add(state_dir)


@contextmanager
def daemon_of(config: str, *options: str, policy: str | None = None, program: Sequence[str] = ()) -> Iterator[Daemon]:
    """The same, with the texts of its configuration and policy, on a directory that goes with it."""
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    file, policy_file = directory / "config.toml", directory / "policy.toml"
    if policy is not None:
        policy_file.write_text(policy)
        config = f'policy.file = "{policy_file}"\n{config}'
    file.write_text(config)
    with running_daemon(directory, "--config", str(file), *options, program=program) as running:
        yield running
    shutil.rmtree(directory)


def is_known(client: ExecutorClient) -> bool:
    """True when the daemon takes the client's token, though it may refuse what the token's tenant asks."""
    try:
        client.get_policy()
    except (AuthenticationError, UnavailableError):
        return False
    except ExecutorClientError:
        return True
    return True


def code_of(call: Callable[[], Any]) -> str:
    """The name of the status that a gRPC call ends with."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def _answers(daemon: Daemon) -> bool:
    assert daemon.process.poll() is None, daemon.log.read_text()
    if not (daemon.state_dir / "executor.sock").exists():
        return False
    try:
        with daemon.client() as client:
            client.get_policy()
    except ExecutorClientError:
        return False
    return True


def _hurry(daemon: Daemon) -> None:
    """Asks it to stop and not to wait for executions, which no client follows any more."""
    daemon.process.send_signal(signal.SIGTERM)
    if not eventually(lambda: daemon.process.poll() is not None, timeout_s=HURRY_AFTER_S):
        daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(STOP_TIMEOUT_S) == 0, daemon.log.read_text()


def _stop(daemon: Daemon) -> None:
    if daemon.process.poll() is not None:
        return
    daemon.process.send_signal(signal.SIGTERM)
    try:
        assert daemon.process.wait(STOP_TIMEOUT_S) == 0, daemon.log.read_text()
    except subprocess.TimeoutExpired:
        daemon.kill()
        pytest.fail(f"the daemon did not stop within {STOP_TIMEOUT_S:g} s:\n{daemon.log.read_text()[-8000:]}")
