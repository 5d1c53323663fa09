"""Runs a daemon for an example: in a temporary directory, without a fixed port, and removed completely at the end.

The daemon promises to leave nothing behind. That is checked here from outside, by looking at the operating system.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
from rented import DoubleFailure, double, rented_by

from executor_client import ExecutorClient, ExecutorClientError

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 20.0
CLEAN_TIMEOUT_S = 10.0
POLL_S = 0.05
LOG_TAIL_CHARS = 4_000
# For each backend, the folder of the state directory with its sandboxes' directories.
SANDBOXES = {"local": "sandboxes", "docker": "docker", "e2b": "e2b"}
# The folder in one of them that stays: packages of sandboxes, packed for the next ones.
ARCHIVES = "archives"
DOUBLE = "e2b-double"
"""The E2B backend on the tests' double of E2B."""


class DaemonFailure(Exception):
    """The daemon failed, as the message describes."""


@contextlib.contextmanager
def own_daemon(backend: str, *, configuration: str = "", policy: str = "") -> Iterator[str]:
    """Runs a daemon and yields its address. Raises DaemonFailure, also when something is left of it at the end.

    `backend` is one of the daemon's, or DOUBLE; `configuration` and `policy` are the texts of its files. While it runs,
    the client of this process finds its token by `EXECUTOR_STATE_DIR`.
    """
    if backend == DOUBLE:
        with _double(), own_daemon("e2b", configuration=configuration, policy=policy) as address:
            yield address
        return
    # A short name, because the path of a Unix socket has at most 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="executor-"))
    state_dir, log = root / "state", root / "daemon.log"
    address = f"unix:{state_dir / 'executor.sock'}"
    before = {name: os.environ.pop(name, None) for name in ("EXECUTOR_STATE_DIR", "EXECUTOR_TOKEN")}
    os.environ["EXECUTOR_STATE_DIR"] = str(state_dir)
    try:
        process = _start(backend, address, log, _write_configuration(root, configuration, policy))
        try:
            _wait_until_ready(process, address)
            yield address
        except BaseException:
            _stop(process)
            print(log.read_text(errors="replace")[-LOG_TAIL_CHARS:], file=sys.stderr)
            raise
        descendants = _processes_below(process.pid)
        _stop(process)
        _check_leftovers(process, descendants, state_dir / SANDBOXES[backend])
    finally:
        del os.environ["EXECUTOR_STATE_DIR"]
        os.environ.update((name, value) for name, value in before.items() if value is not None)
        shutil.rmtree(root)


@contextlib.contextmanager
def own_console() -> Iterator[str]:
    """Runs the console of the daemon of this process, and yields its one-time link. Raises DaemonFailure."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "executor_server", "console", "--actions", "--listen", listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if (found := re.search(r"http://\S+", line)) is None:
                raise DaemonFailure("the console did not start")
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def _double() -> Iterator[None]:
    """Runs the double. This process and those that it starts use it as E2B."""
    before = dict(os.environ)
    try:
        with double() as environment:
            os.environ.update(environment)
            yield
    except DoubleFailure as failure:
        raise DaemonFailure(str(failure)) from failure
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _write_configuration(root: Path, configuration: str, policy: str) -> list[str]:
    """Returns the options that name the files; none where there is nothing to write."""
    if not configuration and not policy:
        return []
    file, policy_file = root / "executor.toml", root / "policy.toml"
    if policy:
        policy_file.write_text(policy)
        configuration = f"policy.file = {json.dumps(str(policy_file))}\n{configuration}"
    file.write_text(configuration)
    return ["--config", str(file)]


def _start(backend: str, address: str, log: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "executor_server", "serve", "--backend", backend, "--listen", address, *options]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def _wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    def ready() -> bool:
        if process.poll() is not None:
            raise DaemonFailure(f"the daemon ended at once, with exit code {process.returncode}")
        if not Path(address.removeprefix("unix:")).exists():
            return False
        try:
            with ExecutorClient(address) as client:
                client.get_policy()
        except ExecutorClientError:
            return False
        return True

    if not _poll(START_TIMEOUT_S, ready):
        raise DaemonFailure(f"the daemon does not answer after {START_TIMEOUT_S:g} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise DaemonFailure(f"the daemon did not stop within {STOP_TIMEOUT_S:g} s of being asked to") from None


def _check_leftovers(process: subprocess.Popen[bytes], descendants: set[Process], directory: Path) -> None:
    if process.returncode != 0:
        raise DaemonFailure(f"the daemon stopped with exit code {process.returncode}")
    if not _poll(CLEAN_TIMEOUT_S, lambda: not descendants & _all_processes().keys()):
        left = sorted(pid for pid, _ in descendants & _all_processes().keys())
        raise DaemonFailure(f"processes of sandboxes are left: {left}")
    if sockets := sorted(path.name for path in directory.parent.rglob("*") if path.is_socket()):
        raise DaemonFailure(f"sockets are left: {', '.join(sockets)}")
    folders = (path for path in directory.iterdir() if path.is_dir() and path.name != ARCHIVES)
    if sandboxes := sorted(path.name for path in folders):
        raise DaemonFailure(f"directories of sandboxes are left: {', '.join(sandboxes)}")
    if directory.name == SANDBOXES["docker"] and (containers := _containers_of(directory)):
        raise DaemonFailure(f"containers are left: {', '.join(containers)}")
    if directory.name == SANDBOXES["e2b"] and (rented := rented_by((directory / ".lock").read_text().strip())):
        raise DaemonFailure(f"sandboxes are left at E2B: {', '.join(rented)}")


def _containers_of(directory: Path) -> list[str]:
    """Returns the names of containers labelled with the daemon's id, which is in its lock file."""
    client = docker.from_env()
    with contextlib.closing(client):
        label = f"executor.daemon={(directory / '.lock').read_text().strip()}"
        return [container.name or "" for container in client.containers.list(all=True, filters={"label": label})]


# ---------------------------------------------------------------------------------------------------------------------

Process = tuple[int, str]
"""A process id and its start time, which together are unique."""


def _all_processes() -> dict[Process, int]:
    """Returns all processes that are alive, with their parents' ids."""
    found: dict[Process, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            found[int(stat.parent.name), fields[19]] = int(fields[1])
    return found


def _processes_below(pid: int) -> set[Process]:
    parents = _all_processes()
    below: set[Process] = set()
    frontier = {pid}
    while frontier:
        children = {process for process, parent in parents.items() if parent in frontier}
        below |= children
        frontier = {child for child, _ in children}
    return below


def _poll(timeout_s: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
