"""Draws in a fork of the interpreter, so that a figure can cost the program no more than its picture.

Drawing runs code of libraries and of the program (formatters, for example), which may raise, exit, take all memory or
never end. The fork has its own time limit, is killed first when memory runs out, and returns a picture or a reason.
Threads of the program do not exist in the fork. A lock that one held costs at most the time limit.
"""

from __future__ import annotations

import gc
import os
import select
import time

from executor_api.limits import IMAGE_BYTES_MAX

from ..checks.failures import text_of
from ..wire.lean import signal
from ..wire.link_messages import DRAWING_TIME_S, Drawing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .runtime import Runtime

_OOM_SCORE = b"1000"  # before the interpreter
_MAX_REASON_CHARS = 300
_READ_BYTES = 1024 * 1024
_DRAWN, _FAILED = b"+", b"-"

# Captured: agent code may replace these names in their modules.
_fork, _exit, _kill, _waitpid = os.fork, os._exit, os.kill, os.waitpid
_monotonic = time.monotonic


class NotDrawn(Exception):
    """The reason, in one line."""


class Drawer:
    """Draws for executions; each has DRAWING_TIME_S in all."""

    def __init__(self, send: Callable[[Drawing], None], runtime: Runtime) -> None:
        self._send = send
        self._runtime = runtime
        self._left_s = DRAWING_TIME_S

    def begin(self) -> None:
        """Begins the next execution."""
        self._left_s = DRAWING_TIME_S

    def draw(self, paint: Callable[[], bytes]) -> bytes:
        """Calls `paint` in a fork and returns its result. Raises NotDrawn."""
        read, write = os.pipe()
        began_s = _monotonic()
        child = 0
        try:
            self._send(Drawing(begins=True))
            try:
                with self._runtime.audit.off():  # rules on the program's processes
                    child = _fork()
            except OSError as error:
                raise NotDrawn(f"no process could be made to draw it: {error.strerror}") from None
            if not child:
                self._paint(paint, write)
            os.close(write)
            write = -1
            answer = _read(read, began_s + self._left_s)
        finally:
            for fd in (read, write):
                if fd >= 0:
                    os.close(fd)
            status = _end(child)
            self._left_s -= _monotonic() - began_s
            self._send(Drawing(begins=False))
        if answer[:1] == _DRAWN:
            return answer[1:]
        raise NotDrawn(answer[1:].decode("utf-8", "replace") or f"the process that drew it ended ({_how(status)})")

    def _paint(self, paint: Callable[[], bytes], write: int) -> None:
        """Draws and exits; in the fork."""
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the interpreter, which ends this process
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, DRAWING_TIME_S)  # in case the interpreter is interrupted
            with open("/proc/self/oom_score_adj", "wb", 0) as file:
                file.write(_OOM_SCORE)
            gc.disable()  # otherwise a collection copies the pages that both processes share
            answer = memoryview(_DRAWN + self._runtime.guarded(paint))
        except BaseException as error:  # noqa: BLE001 (the border of agent code)
            answer = memoryview(_FAILED + one_line(error).encode("utf-8", "replace"))
        try:
            while answer:
                answer = answer[os.write(write, answer) :]
        finally:
            _exit(0)


def one_line(error: BaseException) -> str:
    """Returns the type and the message of an exception, bounded."""
    return " ".join(f"{type(error).__name__}: {text_of(error)}".rstrip(": ").split())[:_MAX_REASON_CHARS]


def _read(fd: int, ends_s: float) -> bytes:
    """Returns everything written until the other end closes. Raises NotDrawn if the time is up first."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    answer = bytearray()
    while True:
        left_s = ends_s - _monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise NotDrawn(f"drawing took longer than the {DRAWING_TIME_S:g} s that an execution may spend on it")
        piece = os.read(fd, _READ_BYTES)
        if not piece:
            return bytes(answer)
        answer += piece
        if len(answer) > 1 + IMAGE_BYTES_MAX:  # with the byte that tells its kind
            raise NotDrawn(f"an image has at most {IMAGE_BYTES_MAX} bytes")


def _end(child: int) -> int:
    """Ends the fork, if there is one; returns its wait status."""
    if not child:
        return 0
    try:
        _kill(child, signal.SIGKILL)
        return _waitpid(child, 0)[1]
    except (ProcessLookupError, ChildProcessError):
        return 0  # the program waits for its children itself, or lets the kernel do it


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"by signal {os.WTERMSIG(status)}, which may have been for lack of memory"
    return f"with code {os.WEXITSTATUS(status)}"
