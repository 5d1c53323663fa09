"""Starts a process: forks, gives the child its terminal or its pipes, and has it run the command.

Theory of operation. The child is forked from pid 1, which is undumpable and ignores every signal. Between fork and exec
it runs the code below and nothing else, and no byte of it comes from agent code: the command, the directory and the
environment are the daemon's values. All descriptors of the supervisor close with the exec (PEP 446). What goes wrong
before that is written to a pipe which the exec closes; the supervisor waits for that end in its loop, since a working
directory on a slow disk must not hold it up.

The steps of the child, and why they stand in this order:

1. setsid: a kernel session of its own. It is how the processes that it starts are found again (sessions.py), and a
   terminal can only become that of a session without one.
2. The terminal, which then is the session's: Ctrl-C and a closed window reach what runs in it.
3. Descriptors 0, 1 and 2.
4. Signals: an ignored one stays ignored across exec, and pid 1 ignores all. A shell without SIGINT and SIGTERM could
   not be stopped, and one without SIGCHLD would wait for ever.
5. The directory, then the command: both as the process itself would see them.
"""

from __future__ import annotations

import os

from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# linux/asm-generic/ioctls.h; the same on x86 and ARM.
_TIOCSCTTY = 0x540E
_FAILED_BEFORE_EXEC = 127
_REPORT_BYTES = 64


class Command:
    """A program with its arguments, the directory that it begins in, and its environment."""

    __slots__ = ("argv", "cwd", "env")

    def __init__(self, argv: list[str], cwd: str, env: dict[str, str]) -> None:
        self.argv = argv
        self.cwd = cwd
        self.env = env


class Streams:
    """The child's descriptors 0, 1 and 2; a terminal is all three."""

    __slots__ = ("is_terminal", "stderr", "stdin", "stdout")

    def __init__(self, stdin: int, stdout: int, stderr: int, *, is_terminal: bool = False) -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.is_terminal = is_terminal


def fork_command(command: Command, streams: Streams) -> tuple[int, int]:
    """Forks the child; returns its pid and the descriptor at which `start_failure` is read, once that is readable.

    Raises OSError when there can be no further process or descriptor.
    """
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(report_read)
        os.close(report_write)
        raise
    if pid == 0:
        _become(command, streams, report_write)
    os.close(report_write)
    return pid, report_read


def start_failure(report_fd: int) -> tuple[str, str]:
    """Reads why the command does not run, as a reason of DONE and a sentence; empty when it runs."""
    report = os.read(report_fd, _REPORT_BYTES).decode()
    if not report:
        return "", ""
    step, _, number = report.partition(" ")
    text = os.strerror(int(number))
    if step == "cwd":
        return "bad_cwd", f"the process can't begin in its working directory: {text}"
    if step == "exec":
        return "command_not_found", f"the command can't be executed: {text}"
    return "no_process", f"the process can't be set up: {step}: {text}"


def _become(command: Command, streams: Streams, report_fd: int) -> NoReturn:
    step = "session"
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        if streams.is_terminal:
            step = "terminal"
            import fcntl

            fcntl.ioctl(streams.stdin, _TIOCSCTTY, 0)
        step = "streams"
        for number, fd in enumerate((streams.stdin, streams.stdout, streams.stderr)):
            os.dup2(fd, number)
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_DFL)
        step = "cwd"
        os.chdir(command.cwd)
        step = "exec"
        os.execvpe(command.argv[0], command.argv, command.env)
    except OSError as error:
        os.write(report_fd, f"{step} {error.errno}".encode())
    finally:
        os._exit(_FAILED_BEFORE_EXEC)
