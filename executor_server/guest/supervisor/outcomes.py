"""The errors of runs that the supervisor interrupted or killed, or whose interpreter died.

A program may report any error. If the supervisor ended the run, its reason becomes the error, and only the place is
taken from the program's report.
"""

from __future__ import annotations

import os

from ..wire.lean import signal
from ..wire.messages import ErrorDetail

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..wire.messages import Execute


# What libraries and our interpreter print when they end the process for lack of memory (OpenBLAS interrupts it).
OUT_OF_MEMORY = b"the interpreter has no memory left\n"
_NO_MEMORY = (
    OUT_OF_MEMORY,
    b"OpenBLAS error: Memory allocation still failed",
    b"OpenBLAS blas_thread_init: pthread_create failed",
    b"std::bad_alloc",
    b"memory allocation of ",
)
# Bytes of an error as JSON.
MAX_ERROR_BYTES = 1024 * 1024


def limit_error(ended_by: str, request: Execute, reported: Optional[ErrorDetail]) -> ErrorDetail:
    """Returns the error of a run that the supervisor ended, with the place that the program reported, if any."""
    said = {
        "timeout": ("TimeoutError", f"the execution took longer than wall_time_s = {request.wall_time_s:g}"),
        "cpu_limit": ("TimeoutError", f"the execution used more than cpu_time_s = {request.cpu_time_s:g}"),
        "output_limit": ("OutputLimit", f"the execution printed far more than output_bytes = {request.output_bytes}"),
        "out_of_memory": ("MemoryError", "the program used more memory than memory_bytes allows"),
        "cancelled": ("Cancelled", "the execution was cancelled"),
    }
    if ended_by not in said:  # the interpreter stopped the program, and reports the reason
        return reported or ErrorDetail(type="Stopped", message=f"{ended_by}: the program did not stop, and was killed")
    type_name, message = said[ended_by]
    if reported is None:
        return ErrorDetail(type=type_name, message=message)
    traceback = reported.traceback
    if traceback:
        # The last line names the interrupt, and is replaced. The lines before it are the program's place.
        traceback = "\n".join([*traceback.rstrip().split("\n")[:-1], f"{type_name}: {message}\n"])
    return reported.but(type=type_name, message=message, traceback=traceback, exit_code=None)


def says_no_memory(data: bytes) -> bool:
    """True for output of a process that ends for lack of memory."""
    return any(text in data for text in _NO_MEMORY)


def memory_error(memory_bytes: int) -> ErrorDetail:
    """Returns the error of a run whose process printed such output."""
    message = (
        f"a library could not get the memory that it needs (its message is on stderr): memory_bytes = "
        f"{memory_bytes:,} is too little; ask for more: limits={{'memory_bytes': ...}}"
    )
    return ErrorDetail(type="MemoryError", message=message)


def exit_error(status: int) -> tuple[str, ErrorDetail]:
    """Returns the outcome and the error of a run whose interpreter ended by itself, from its wait status."""
    code, signum = describe_exit(status)
    if code is None:
        return "crashed", ErrorDetail(type="Crash", message=f"the interpreter was ended by {_signal_name(signum)}")
    message = f"the program ended its interpreter with exit code {code}"
    return "exited", ErrorDetail(type="SystemExit", message=message, exit_code=code)


def describe_exit(status: int) -> tuple[Optional[int], Optional[int]]:
    """Returns (exit code, signal) of a wait status; one of them is None."""
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _signal_name(signum: Optional[int]) -> str:
    from signal import Signals

    return Signals(signum).name if signum in signal.valid_signals() else f"signal {signum}"
