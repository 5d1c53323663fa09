"""Starts a process with its terminal or pipes, in its own kernel session, and executes the command.

Theory of operation. The process is forked from pid 1, which is undumpable and ignores every signal. posix_spawn is
faster, but has no step for resource limits: if this process set them afterwards, the program would already run, and
might have forked. No byte between here and the exec comes from agent code: command, directory and environment are the
daemon's values. All descriptors of the supervisor close with the exec (PEP 446).

The steps, and the reasons for their order:

1. The directory: set here, so that the program is found in it. This process has one thread, and goes back at once.
2. setsid makes a kernel session. It identifies the descendants of the process (sessions.py), and only a new session can
   get a terminal.
3. The terminal is opened by the child, so that it belongs to the session: Ctrl-C and a closed window reach its
   processes.
4. Signals: pid 1 ignores all, and an ignored signal stays ignored across exec. A shell without SIGINT and SIGTERM could
   not be stopped, and one without SIGCHLD would wait for ever.
5. The resource limits are last, because they are meant for the program. The stack's is raised if the arguments need it.
"""

from __future__ import annotations

import errno
import os
import resource
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
# Errors that mean that the sandbox has no room for a process. All others are the command's fault.
_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_NO_SUCH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
_CWD_REASONS = {
    errno.ENOENT: "cwd_not_found",
    errno.ENOTDIR: "file_not_directory",
    errno.EACCES: "file_permission_denied",
}
_SHOWN_CHARS = 200
# Bytes of the stack in addition to the arguments and variables: the program's path, and what the kernel adds.
_STACK_SPARE_BYTES = 128 * 1024


class NotStarted(Exception):
    """The command does not run. `reason` is for DONE."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Command:
    """A program with its arguments, its working directory, and its environment."""

    __slots__ = ("argv", "cwd", "env", "prefers_bash")

    def __init__(self, argv: list[str], cwd: str, env: dict[str, str], *, prefers_bash: bool = False) -> None:
        self.argv = argv
        self.prefers_bash = prefers_bash  # run bash in place of the program, if the PATH has it
        self.cwd = cwd
        self.env = env


class Streams:
    """The descriptors for the child's 0, 1 and 2; or a terminal for all three."""

    __slots__ = ("stderr", "stdin", "stdout", "terminal")

    def __init__(self, stdin: int, stdout: int, stderr: int, terminal: str = "") -> None:
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.terminal = terminal  # its path


def start_command(command: Command, streams: Streams, limit: Callable[[], None]) -> int:
    """Starts the command in a process that `limit` has limited; returns its pid.

    Raises NotStarted; OSError if no further process is possible.
    """
    back = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.chdir(command.cwd)
        except OSError as error:
            reason = _CWD_REASONS.get(error.errno or 0, "path_refused")
            raise NotStarted(reason, f"the process can't begin in {command.cwd!r}: {error.strerror}") from error
        program = _program(command)
        try:
            return _forked(program, command, streams, limit)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            raise _not_executed(program, command, error) from error
    finally:
        _return_to(back)
        os.close(back)


def _return_to(directory: int) -> None:
    """Goes back to the supervisor's own directory.

    Agent code owns that directory and can remove its permissions. A started process must not be reported as failed
    because of that: it would run without an owner.
    """
    try:
        os.fchdir(directory)
    except OSError:
        os.chdir("/")


def _program(command: Command) -> str:
    """Returns the path of the program. Raises NotStarted if the PATH in its environment does not have it."""
    name = command.argv[0]
    if command.prefers_bash and (bash := _find("bash", command, os.X_OK)):
        command.argv[0] = "bash"  # called sh, it would behave like sh
        return bash
    # As in a shell: the first executable file, else the first file of that name; its execve then gives the reason.
    path = name if "/" in name else _find(name, command, os.X_OK) or _find(name, command, os.F_OK)
    if not path:
        raise NotStarted("command_not_found", f"{name[:_SHOWN_CHARS]}: command not found in the PATH of the process")
    return path


def _find(name: str, command: Command, mode: int) -> str:
    for directory in command.env.get("PATH", os.defpath).split(os.pathsep):
        path = f"{directory or '.'}/{name}"
        if os.access(path, mode) and not os.path.isdir(path):
            return path
    return ""


def _not_executed(program: str, command: Command, error: OSError) -> NotStarted:
    """Explains an error of execve, which reports a missing interpreter like a missing program."""
    reason, why = "command_not_executable", error.strerror or "unknown error"
    if error.errno == errno.E2BIG:
        reason = "too_large"
        why = "the arguments and the environment are larger than the kernel takes; pass them as a file or as input"
    elif error.errno == errno.ENOENT and os.path.exists(program):
        why = "the file is there, but the interpreter that its first line names, or its loader, is not"
    elif error.errno in _NO_SUCH:
        reason = "command_not_found"
    elif error.errno == errno.ENOEXEC:
        why = "neither a program of this machine nor a script with a first line such as #!/bin/sh"
    elif os.path.isdir(program):
        why = os.strerror(errno.EISDIR)
    return NotStarted(reason, f"{command.argv[0][:_SHOWN_CHARS]}: {why}")


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
        raise OSError(number, os.strerror(number))
    return pid


def _report_of(pid: int, report_read: int) -> bytes:
    """Returns the error that the child reports, or nothing once it has executed the command.

    The attack: agent code has the same uid, and stops the child before the exec.
    """
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
        _allow_arguments(command)
        os.execve(program, command.argv, command.env)
    except OSError as error:
        os.write(report_fd, str(error.errno).encode())
    finally:
        os._exit(_FAILED_BEFORE_EXEC)


def _allow_arguments(command: Command) -> None:
    """Raises the stack's limit if it is too low: the kernel allows arguments and variables a quarter of it."""
    texts = [*command.argv, *command.env.keys(), *command.env.values()]
    size_bytes = sum(len(os.fsencode(text)) + 9 for text in texts)  # with a NUL and a pointer
    needed = 4 * (size_bytes + _STACK_SPARE_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (raised, hard))
