"""Starts a process: gives it its terminal or its pipes, a kernel session of its own, and has it run the command.

Theory of operation. It is forked from pid 1, which is undumpable and ignores every signal. posix_spawn is faster, but
has no step for resource limits: set from here, they would come when the program runs already, and may have forked. No
byte between here and the exec comes from agent code: the command, the directory and the environment are the daemon's
values. All descriptors of the supervisor close with the exec (PEP 446).

The steps, and why they stand in this order:

1. The directory: here, so that the program is looked for in it; this process has one thread, and goes back at once.
2. setsid: a kernel session of its own. It is how the processes that it starts are found again (sessions.py), and a
   terminal can only become that of a session without one.
3. The terminal, opened by the child: it then is the session's, and Ctrl-C and a closed window reach what runs in it.
4. Signals: an ignored one stays ignored across exec, and pid 1 ignores all. A shell without SIGINT and SIGTERM could
   not be stopped, and one without SIGCHLD would wait for ever.
5. The resource limits: last, since they are the program's.
"""

from __future__ import annotations

import errno
import os
import select

from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, NoReturn

# linux/asm-generic/ioctls.h; the same on x86 and ARM.
_TIOCSCTTY = 0x540E
_FAILED_BEFORE_EXEC = 127
_REPORT_BYTES = 16
_EXEC_TIME_MS = 1000
# Failures for want of something: the sandbox has no room for a process. Every other one is the command's.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class NotStarted(Exception):
    """The command does not run. `reason` is that of DONE."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Command:
    """A program with its arguments, the directory that it begins in, and its environment."""

    __slots__ = ("argv", "cwd", "env", "prefers_bash")

    def __init__(self, argv: list[str], cwd: str, env: dict[str, str], *, prefers_bash: bool = False) -> None:
        self.argv = argv
        self.prefers_bash = prefers_bash  # it takes the place of the program, where the PATH has it
        self.cwd = cwd
        self.env = env


class Streams:
    """The descriptors that become the child's 0, 1 and 2; or a terminal, which is all three."""

    __slots__ = ("stderr", "stdin", "stdout", "terminal")

    def __init__(self, stdin: int, stdout: int, stderr: int, terminal: str = "") -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.terminal = terminal  # its path


def start_command(command: Command, streams: Streams, limit: Callable[[], None]) -> int:
    """Starts the command in a process that `limit` has limited; returns its pid.

    Raises NotStarted; OSError when there can be no further process.
    """
    back = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.chdir(command.cwd)
        except OSError as error:
            raise NotStarted("bad_cwd", f"the process can't begin in {command.cwd!r}: {error.strerror}") from error
        program = _program(command)
        try:
            return _forked(program, command, streams, limit)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            raise _not_executed(command, error) from error
    finally:
        _return_to(back)
        os.close(back)


def _return_to(directory: int) -> None:
    """Goes back to the supervisor's own directory.

    Agent code owns that directory and can take away the right to it. It must not turn a start that succeeded into one
    that failed: the process would run without an owner.
    """
    try:
        os.fchdir(directory)
    except OSError:
        os.chdir("/")


def _program(command: Command) -> str:
    """Returns the path of the program. Raises NotStarted when the PATH of its environment has none of the name."""
    name = command.argv[0]
    if command.prefers_bash and (bash := _find("bash", command)):
        command.argv[0] = "bash"  # by the name of sh it would be one
        return bash
    path = name if "/" in name else _find(name, command)
    if not path:
        raise NotStarted("command_not_found", f"there is no command {name!r} in the PATH of the process")
    return path


def _find(name: str, command: Command) -> str:
    for directory in command.env.get("PATH", os.defpath).split(os.pathsep):
        path = f"{directory or '.'}/{name}"
        if os.access(path, os.X_OK) and not os.path.isdir(path):
            return path
    return ""


def _not_executed(command: Command, error: OSError) -> NotStarted:
    return NotStarted("command_not_found", f"the command {command.argv[0]!r} can't be executed: {error.strerror}")


def _default_signals() -> list[int]:
    return [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]


def _forked(program: str, command: Command, streams: Streams, limit: Callable[[], None]) -> int:
    """Forks. The child reports a failure through a pipe that the exec closes."""
    report_read, report_write = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _become(program, command, streams, limit, report_write)
        os.close(report_write)
        report_write = -1
        report = _report_of(pid, report_read)
    finally:
        os.close(report_read)
        if report_write >= 0:
            os.close(report_write)
    if report:
        os.waitpid(pid, 0)
        number = int(report)
        raise _not_executed(command, OSError(number, os.strerror(number)))
    return pid


def _report_of(pid: int, report_read: int) -> bytes:
    """Returns what a child reports before its exec. The attack: agent code has its user, and stops it before that."""
    waiter = select.poll()
    waiter.register(report_read)
    if waiter.poll(_EXEC_TIME_MS):
        return os.read(report_read, _REPORT_BYTES)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise OSError(errno.EAGAIN, "the process was stopped before its command ran")


def _become(program: str, command: Command, streams: Streams, limit: Callable[[], None], report_fd: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        if streams.terminal:
            import fcntl

            terminal = os.open(streams.terminal, os.O_RDWR)
            fcntl.ioctl(terminal, _TIOCSCTTY, 0)
            streams = Streams(terminal, terminal, terminal)
        for number, fd in enumerate((streams.stdin, streams.stdout, streams.stderr)):
            os.dup2(fd, number)
        for number in _default_signals():
            signal.signal(number, signal.SIG_DFL)
        limit()
        os.execve(program, command.argv, command.env)
    except OSError as error:
        os.write(report_fd, str(error.errno).encode())
    finally:
        os._exit(_FAILED_BEFORE_EXEC)
