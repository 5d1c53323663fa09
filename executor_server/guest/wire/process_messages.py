"""The messages of the guest channel about processes and ports; messages.py explains what all messages share."""

from __future__ import annotations

from executor_api.limits import ARGUMENTS_BYTES_MAX

from .frames import Kind
from .schema import Message, Request, boolean, identifier, integer, number, one_of, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

_MAX_PATH_CHARS = 4096
_MAX_TERMINAL_CHARS = 1000  # columns or rows
OUTPUT_OVERHEAD_BYTES = 256
"""Bytes that a frame of a process's output costs the daemon, in addition to its body."""
TAIL_BYTES = 64 * 1024
"""Bytes, with overhead, of the tail of a process's output that passed its limit; sent at its end, granted or not."""
PORT_WINDOW_BYTES = 2 * 1024 * 1024
"""Bytes that one end of a forwarded connection may send before the other has passed them on."""
MAX_SIGNAL = 64
PROCESS_OUTCOMES = ("exited", "signalled", "timeout")


# ---------------------------------------------------------------------------------------------------------------------
# Daemon to guest


class StartProcess(Request, kind=Kind.START_PROCESS):
    """Body: the program and its arguments, `argv` bytes with a NUL after each; an object of environment variables.

    DONE says that it runs. A repeated id gets the same DONE, and starts nothing.
    """

    id: str = identifier()
    argv: int = integer(0, ARGUMENTS_BYTES_MAX)
    cwd: str = text(_MAX_PATH_CHARS)
    columns: Optional[int] = integer(1, _MAX_TERMINAL_CHARS, default=None)
    rows: Optional[int] = integer(1, _MAX_TERMINAL_CHARS, default=None)
    stdin: bool = boolean()
    timeout_s: Optional[float] = number(0.001, default=None)
    output_bytes: int = integer(1)
    granted: int = integer()
    prefers_bash: bool = boolean(default=False)
    merge_stderr: bool = boolean(default=False)


class WriteProcess(Request, kind=Kind.WRITE_PROCESS):
    """Body: bytes for its standard input or terminal, from `offset` on. DONE has the total accepted so far."""

    id: str = identifier()
    offset: int = integer()
    eof: bool = boolean(default=False)


class ResizeProcess(Request, kind=Kind.RESIZE_PROCESS):
    id: str = identifier()
    columns: int = integer(1, _MAX_TERMINAL_CHARS)
    rows: int = integer(1, _MAX_TERMINAL_CHARS)


class SignalProcess(Request, kind=Kind.SIGNAL_PROCESS):
    id: str = identifier()
    signal: int = integer(1, MAX_SIGNAL)
    target: str = one_of("group", "process", "tree")


class GrantOutput(Message, kind=Kind.GRANT_OUTPUT):
    """Total bytes that the output may cost, with OUTPUT_OVERHEAD_BYTES for each frame. Never decreases."""

    id: str = identifier()
    granted: int = integer()


class ForgetProcess(Message, kind=Kind.FORGET_PROCESS):
    """The process has ended, and its id may be used again."""

    id: str = identifier()


class OpenPort(Request, kind=Kind.OPEN_PORT):
    """Opens a connection to a port of the sandbox's loopback; `op` names it.

    PORT_OUTPUT without a body says that it is open. Each end sends as much as the other has granted, then `eof`. DONE
    ends the connection: after both `eof`, or, not ok, if it could not be opened or broke.
    """

    port: int = integer(1, 65_535)
    granted: int = integer()


class PortInput(Request, kind=Kind.PORT_INPUT):
    """Body: bytes for the program."""

    eof: bool = boolean(default=False)


class GrantPort(Request, kind=Kind.GRANT_PORT):
    """Total bytes that the guest may send on this connection. Never decreases."""

    granted: int = integer()


class ClosePort(Request, kind=Kind.CLOSE_PORT):
    """Resets a connection. There is no answer."""


# ---------------------------------------------------------------------------------------------------------------------
# Guest to daemon


class ProcessStarted(Message, kind=Kind.PROCESS_STARTED):
    id: str = identifier()
    pid: int = integer(2, 2**31 - 1)


class ProcessOutput(Message, kind=Kind.PROCESS_OUTPUT):
    """Body: the output, at most CHUNK_BYTES."""

    id: str = identifier()
    stream: str = one_of("stdout", "stderr")


class ProcessOutputCut(Message, kind=Kind.PROCESS_OUTPUT_CUT):
    id: str = identifier()
    omitted: int = integer()


class ProcessEnded(Message, kind=Kind.PROCESS_ENDED):
    id: str = identifier()
    outcome: str = one_of(*PROCESS_OUTCOMES)
    exit_code: int = integer(0, 255)
    signal: int = integer(0, MAX_SIGNAL)
    wall_time_s: float = number()
    cpu_time_s: float = number()
    peak_memory_bytes: int = integer()
    output_bytes: int = integer()


class PortOutput(Message, kind=Kind.PORT_OUTPUT):
    """Body: bytes from the program. `granted`: total bytes that the daemon may send on this connection."""

    op: int = integer()
    eof: bool = boolean(default=False)
    granted: Optional[int] = integer(default=None)
