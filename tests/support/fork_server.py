"""Starts daemons as forks of a process that has imported them: a start takes a tenth of the processor's time.

Importing the daemon takes 0.7 s of processor time, which was two thirds of what the chaos tests took. So each process
that runs tests has a *server*: a fresh interpreter with one thread and nothing open, which imports the daemon's modules
and forks for each order. What runs in the fork is the command line with the order's arguments, environment, directory
and output; nothing of a daemon is ever done in the server itself. `pytest --all` starts every daemon as a program.

The server reaps its forks and reports how they ended; a fork's orphans go to the reaper of the tests, as always.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
_ORDER_BYTES = 1 << 20
# A daemon imports these for a backend of its arguments or its configuration, and the SDK with them.
_MODULES_OF_BACKENDS = {"docker": "executor_server.backends.docker", "e2b": "executor_server.backends.e2b.cloud"}
# Read while modules are imported, or by libraries at their start: who sets one gets a program of its own.
_EARLY_VARIABLES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GRPC_")


# ---------------------------------------------------------------------------------------------------------------------
# In the process of the tests


class Forked:
    """A fork of the server, with those methods of `subprocess.Popen` that the tests of daemons use."""

    def __init__(self, reports: socket.socket) -> None:
        """`reports` gives the process's number, and when it has ended its exit status."""
        self._reports = reports
        self.pid = self._report()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            return self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._reports.settimeout(timeout)
            try:
                self.returncode = self._report()
            except (TimeoutError, BlockingIOError):
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from None
            self._reports.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _report(self) -> int:
        data = self._reports.recv(64)
        assert data, "the server of forks has ended"
        return int(data)


class _Server:
    """The server of this process, which ends when this one does."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.early = _early(os.environ)
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno())]
            # Its output is the tests' own: it has none, unless it fails.
            self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self._connection.close()
        self.process.wait()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Forked:
        asked = " ".join([*arguments, *_configuration(arguments)])
        order = json.dumps(
            {
                "arguments": arguments,
                "environment": dict(environment),
                "directory": str(Path.cwd()),
                "modules": [module for backend, module in _MODULES_OF_BACKENDS.items() if backend in asked],
            }
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._connection, [order.encode()], [output.fileno(), theirs.fileno()])
        return Forked(ours)


_server: _Server | None = None


def start_daemon(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> Forked | subprocess.Popen[bytes]:
    """Runs `executor-server` with these arguments, as a fork where that is the same."""
    global _server
    if _server is None or _server.owner != os.getpid():
        _server = _Server()
        atexit.register(_server.close)
    if _early(environment) != _server.early:
        return start_program(arguments, environment, output)
    return _server.start(arguments, environment, output)


def start_program(
    arguments: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Runs it as a user does."""
    command = [sys.executable, "-m", "executor_server", *arguments]
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def server_pid() -> int | None:
    """The number of this process's server, which ends with it; None where there is none yet."""
    return _server.process.pid if _server is not None and _server.owner == os.getpid() else None


def _configuration(arguments: Sequence[str]) -> list[str]:
    """The text of the configuration that the arguments name, where they name one that can be read."""
    if "--config" not in arguments[:-1]:
        return []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return [Path(arguments[arguments.index("--config") + 1]).read_text()]
    return []


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_EARLY_VARIABLES)}


# ---------------------------------------------------------------------------------------------------------------------
# In the server


def _serve(connection: socket.socket) -> list[str] | None:
    """Forks for each order until the tests' end. Returns a fork's arguments in that fork, and in the server None."""
    reports: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process: its number, where to report
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in reports:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *reports.pop(key.fd))
                    continue
                text, descriptors, _, _ = socket.recv_fds(connection, _ORDER_BYTES, 2)
                if not text:
                    return None
                output, report_to = descriptors
                order = json.loads(text)
                for module in order["modules"]:
                    with contextlib.suppress(ImportError):  # the daemon says so itself
                        importlib.import_module(module)
                gc.freeze()  # a collection in a fork would copy the pages of all modules
                if (pid := os.fork()) == 0:
                    # Each object gives its descriptor up now, not when the number is that of something of the daemon.
                    for _, report in reports.values():
                        report.close()
                    connection.close()
                    selector.close()
                    return _become(order, output)
                os.close(output)
                report = socket.socket(fileno=report_to)
                report.send(str(pid).encode())
                process = os.pidfd_open(pid)
                reports[process] = pid, report
                selector.register(process, selectors.EVENT_READ)


def _report_end(process: int, pid: int, report: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with report, contextlib.suppress(BrokenPipeError):  # its client waits for it no more
        report.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(order: dict[str, object], output: int) -> list[str]:
    """Makes a fork what a program is that the tests start."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment, arguments = order["environment"], order["arguments"]
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    os.chdir(str(order["directory"]))
    return arguments


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the tests too, which end this process
    connection = socket.socket(fileno=int(sys.argv[1]))
    import executor_server.__main__
    import executor_server.app.daemon
    from executor_server.cli import main as command_line

    arguments = _serve(connection)
    if arguments is not None:
        sys.argv = [executor_server.__main__.__file__, *arguments]
        command_line(prog_name="python -m executor_server")


if __name__ == "__main__":
    main()
