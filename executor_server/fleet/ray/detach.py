"""Starts a command that outlives its starter, or finds the one that runs already.

    python -m executor_server.fleet.ray.detach PID_FILE LOG_FILE COMMAND...

Prints `started PID` or `adopted PID`. When an actor ends, Ray also ends its children, even those in another session:
raylets find them by their parents. This program is that child. It forks the command into a new session and ends, so
that the command's parent is process 1. It is a program and not a function because a Ray worker has threads, and a
process with threads can't fork and go on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from executor_server.fleet.ray.processes import held, identity_of, read_pid_file, write_pid_file

MAX_LOG_BYTES = 64 * 1024 * 1024
"""Bytes of a log after which it is moved to NAME.1 when the command is started the next time."""
MAX_PROBLEM_BYTES = 1000
# Ray sets these for its workers; a daemon and its sandboxes must not inherit them.
_OF_RAY = ("RAY_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT", "SPT_NOENV")


def main(arguments: Sequence[str]) -> int:
    pid_file, log_file, *command = arguments
    with held(Path(pid_file)):
        if (running := read_pid_file(Path(pid_file))) is not None:
            print(f"adopted {running.pid}")  # noqa: T201 - the answer to the actor
            return 0
        pid = _start(Path(pid_file), Path(log_file), command)
    print(f"started {pid}")  # noqa: T201
    return 0


def _start(pid_file: Path, log_file: Path, command: list[str]) -> int:
    """Returns when the command runs and its pid file is there, so that no other starter can miss it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            _become(pid_file, log_file, command)
        except OSError as error:
            os.write(writing, str(error).encode()[:MAX_PROBLEM_BYTES])
        finally:
            os._exit(127)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        # The pipe ends when the command starts, which does not inherit its descriptor.
        if problem := pipe.read():
            raise SystemExit(problem.decode())
    return pid


def _become(pid_file: Path, log_file: Path, command: list[str]) -> None:
    os.setsid()
    identity = identity_of(os.getpid())
    assert identity is not None
    write_pid_file(pid_file, identity)
    _leave_ray()
    if log_file.exists() and log_file.stat().st_size > MAX_LOG_BYTES:
        log_file.replace(log_file.with_name(f"{log_file.name}.1"))
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    empty = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((empty, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
    os.chdir(pid_file.parent)
    os.execvpe(command[0], command, environment)


def _leave_ray() -> None:
    """Undoes Ray's settings of its workers: they are killed first when memory is short, and they run at nice 15."""
    with suppress(PermissionError):
        Path("/proc/self/oom_score_adj").write_text("0")
    # Without the right the daemon keeps Ray's niceness, as docs/fleet.md says; RAY_worker_niceness=0 avoids it.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
