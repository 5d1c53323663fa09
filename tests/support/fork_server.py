"""Runs our own programs as forks of a process that has imported them: a start takes a tenth of the processor's time.

Importing the daemon takes a second of processor time and the client's command line half of one, which was a third of
what the tests took. So each process that runs tests has a *server*: a fresh interpreter with one thread and nothing
open, which imports our modules and forks for each order. What runs in the fork is the command line with the order's
arguments, environment, directory and standard streams; nothing of a program is ever done in the server itself.
`pytest --all` starts every program as users do.

The server reaps its forks and reports how they ended; a fork's orphans go to the reaper of the tests, as always.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import rounds

ROOT = Path(__file__).resolve().parents[2]
SERVER = (sys.executable, "-m", "executor_server")
EXECUTOR = (sys.executable, "-m", "executor_client.cli")
"""The commands of our programs."""
KILLED_DAEMON = (sys.executable, "-m", "tests.support.killed_daemon")
"""A program of the tests, which it imports in its fork alone."""
TIMEOUT_S = 60.0
_ORDER_BYTES = 1 << 20
# Imported for a program whose arguments or configuration say this word, and what they import with them.
_LATE_MODULES = {
    "docker": "executor_server.backends.docker",
    "e2b": "executor_server.backends.e2b.cloud",
    "front": "executor_server.fleet.daemons.front",
    "mcp": "executor_client.mcp.command",
}
# Read while modules are imported, or by libraries at their start: who sets one gets a program of its own.
_EARLY_VARIABLES = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "GRPC_")
# The options of `Popen` that a fork has.
_OPTIONS = {"stdin", "stdout", "stderr", "env", "cwd", "text", "start_new_session", "bufsize", "encoding"}


# ---------------------------------------------------------------------------------------------------------------------
# In the process of the tests


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen`, with a fork for a program of ours where that is the same."""
    return (Forked if is_forked(command, options) else subprocess.Popen)(command, **options)


def run(
    command: Sequence[str], *, input: Any = None, timeout: float | None = None, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with `capture_output`, with a fork where that is the same."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()  # or its end would be waited for
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def server(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `executor-server` to its end, with these variables more in its environment."""
    return run([*SERVER, *arguments], env={**os.environ, **environment}, text=True, timeout=TIMEOUT_S)


def is_forked(command: Sequence[str], options: Mapping[str, Any]) -> bool:
    """True for a program of ours whose start reads nothing that the server's own start has read otherwise."""
    is_ours = tuple(command[:3]) in (SERVER, EXECUTOR, KILLED_DAEMON)
    return (
        not rounds.ALL
        and is_ours
        and options.keys() <= _OPTIONS
        and _early(options.get("env") or os.environ) == _server().early
    )


class Forked(subprocess.Popen[Any]):
    """A fork of the server. Only its start and the report of its end differ from a child's."""

    _reports: socket.socket  # gives the process's number, and when it has ended its status

    def _execute_child(self, args: Sequence[str], *settings: Any) -> None:
        # As `Popen.__init__` calls it, in each Python from 3.11 on.
        _, _, _, _, cwd, env, _, _, _, stdin, p2cwrite, c2pread, stdout, errread, stderr, *_ = settings
        start_new_session = settings[20]
        order = {
            "program": args[2],
            "arguments": args[3:],
            "environment": dict(os.environ if env is None else env),
            "directory": str(cwd or Path.cwd()),
            "session": bool(start_new_session),
        }
        streams = [number if own == -1 else own for number, own in enumerate((stdin, stdout, stderr))]
        self._reports = _server().start(order, streams)
        self.pid = int(self._reports.recv(64))
        self._child_created = True
        self._close_pipe_fds(stdin, p2cwrite, c2pread, stdout, errread, stderr)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                self._handle_exitstatus(ended[1])  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._reports], [], [], 0)[0]:
            return 0, 0
        status = self._reports.recv(64)
        assert status, "the server of forks has ended"
        self._reports.close()
        return self.pid, int(status)


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
        atexit.register(self.close)

    def close(self) -> None:
        if self.owner == os.getpid():
            self._connection.close()
            self.process.wait()

    def start(self, order: Mapping[str, Any], streams: Sequence[int]) -> socket.socket:
        """Returns the connection on which the fork is reported."""
        asked = " ".join([*order["arguments"], *_configuration(order)])
        late = [module for word, module in _LATE_MODULES.items() if word in asked]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            data = json.dumps({**order, "modules": late}).encode()
            socket.send_fds(self._connection, [data], [*streams, theirs.fileno()])
        return ours


_started: _Server | None = None


def _server() -> _Server:
    global _started
    if _started is None or _started.owner != os.getpid():
        _started = _Server()
    return _started


def server_pid() -> int | None:
    """The number of this process's server, which ends with it; None where there is none yet."""
    return _started.process.pid if _started is not None and _started.owner == os.getpid() else None


def _configuration(order: Mapping[str, Any]) -> list[str]:
    """The text of the configuration that the arguments name, where they name one that can be read."""
    arguments = order["arguments"]
    if "--config" not in arguments[:-1]:
        return []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return [Path(order["directory"], arguments[arguments.index("--config") + 1]).read_text()]
    return []


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_EARLY_VARIABLES)}


# ---------------------------------------------------------------------------------------------------------------------
# In the server


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Forks for each order until the tests' end. Returns a fork's order in that fork, and in the server None."""
    reports: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process: its number, where to report
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in reports:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *reports.pop(key.fd))
                    continue
                text, descriptors, _, _ = socket.recv_fds(connection, _ORDER_BYTES, 4)
                if not text:
                    return None
                *streams, report_to = descriptors
                order: dict[str, Any] = json.loads(text)
                for module in order["modules"]:
                    with contextlib.suppress(ImportError):  # the program says so itself
                        importlib.import_module(module)
                gc.freeze()  # a collection in a fork would copy the pages of all modules
                if (pid := os.fork()) == 0:
                    # Each object gives its descriptor up now, not when the number is that of something of the program.
                    for _, report in reports.values():
                        report.close()
                    connection.close()
                    selector.close()
                    _become(order, streams)
                    return order
                for descriptor in streams:
                    os.close(descriptor)
                report = socket.socket(fileno=report_to)
                report.send(str(pid).encode())
                process = os.pidfd_open(pid)
                reports[process] = pid, report
                selector.register(process, selectors.EVENT_READ)


def _report_end(process: int, pid: int, report: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with report, contextlib.suppress(BrokenPipeError):  # its client waits for it no more
        report.send(str(status).encode())


def _become(order: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Makes a fork what a program is that the tests start."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if order["session"]:
        os.setsid()
        with contextlib.suppress(OSError):  # it is no terminal
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # The streams of the server are no terminals, and a line is written to those at once.
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    tempfile.tempdir = None
    os.chdir(order["directory"])


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the tests too, which end this process
    connection = socket.socket(fileno=int(sys.argv[1]))
    import executor_client.cli.commands
    import executor_client.cli.processes
    import executor_server.__main__
    import executor_server.daemon.cli
    import executor_server.daemon.daemon

    run_program: dict[str, Callable[[], Any]] = {
        "executor_client.cli": executor_client.cli.main,
        "executor_server": functools.partial(executor_server.daemon.cli.main, prog_name="python -m executor_server"),
        KILLED_DAEMON[2]: lambda: importlib.import_module(KILLED_DAEMON[2]).main(),
    }
    order = _serve(connection)
    if order is not None:
        program = order["program"]
        is_package = importlib.util.find_spec(program).submodule_search_locations is not None  # type: ignore[union-attr]
        spec = importlib.util.find_spec(f"{program}.__main__" if is_package else program)
        sys.argv = [str(spec.origin), *order["arguments"]]  # type: ignore[union-attr]
        sys.exit(run_program[program]())


if __name__ == "__main__":
    main()
