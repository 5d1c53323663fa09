"""One run of code in the interpreter, as the supervisor sees it: deadlines, output, tool calls, how it ended.

A run is an execution of the daemon's, or the session's prelude (then `execution_id` is empty and nothing of it is
told). All that decides an outcome is measured here, outside the interpreter; what the interpreter says of itself is
only believed where it can do no harm: that it finished, and with which error.
"""

from __future__ import annotations

import fcntl
import os
import time

from executor_api.limits import (
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    TOOL_ARGUMENTS_BYTES_MAX,
    TOOL_CALLS_OPEN_MAX,
)

from .artifacts import Artifacts
from .channel import Channel
from .frames import Fields, FrameError
from .lean import loads
from .log_relay import LogRelay
from .usage import CpuMeter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Union

# From the interrupt to the kill.
GRACE_S = 1.5
# For parsing, checking and instrumenting one source.
CHECK_TIME_S = 10.0
F_SETPIPE_SZ = 1031
_PIPE_BYTES = 1024 * 1024
# Of what a source imports.
MAX_IMPORTS = 64
MAX_IMPORT_CHARS = 200
IMAGE_TYPES = frozenset(("image/png", "image/jpeg"))
IMAGE_SOURCES = frozenset(("figure", "display"))
# How a program may say that it ended; everything else is for the supervisor and the daemon to find.
OWN_OUTCOMES = frozenset(
    ("succeeded", "exception", "import_denied", "policy_denied", "operation_limit", "out_of_memory", "exited")
)
# As JSON.
MAX_ERROR_BYTES = 1024 * 1024


# A budget of which so much is spent is nearly spent.
_WARN_NUMERATOR, _WARN_DENOMINATOR = 4, 5


class Phase:
    CHECKING = "checking"
    RUNNING = "running"


class Settings:
    """What the daemon asks of a run."""

    __slots__ = ("cpu_time_s", "mode", "operations", "output_bytes", "wall_time_s")

    def __init__(self, mode: str, wall_time_s: float, cpu_time_s: float, operations: int, output_bytes: int) -> None:
        self.mode = mode
        self.wall_time_s = wall_time_s
        self.cpu_time_s = cpu_time_s
        self.operations = operations
        self.output_bytes = output_bytes

    def fields(self) -> dict[str, Any]:
        """As the daemon sends them."""
        return {name: getattr(self, name) for name in self.__slots__}

    def at_most(self, ceilings: Optional[Fields]) -> Settings:
        """These, or less where the policy allows an execution of the session less."""
        if ceilings is None:
            return self
        return Settings(
            mode=self.mode,
            wall_time_s=min(self.wall_time_s, ceilings.number("wall_time_s", 0.001)),
            cpu_time_s=min(self.cpu_time_s, ceilings.number("cpu_time_s", 0.001)),
            operations=min(self.operations, ceilings.integer("operations", 1)),
            output_bytes=min(self.output_bytes, ceilings.integer("output_bytes", 2)),
        )

    @classmethod
    def read(cls, fields: Fields) -> Settings:
        return cls(
            mode=fields.text("mode", 32),
            wall_time_s=fields.number("wall_time_s", 0.001),
            cpu_time_s=fields.number("cpu_time_s", 0.001),
            operations=fields.integer("operations", 1),
            output_bytes=fields.integer("output_bytes", 2),
        )


class Warning:
    """What will be told of a limit when a run has taken `mark` operations; 0 is at its start."""

    __slots__ = ("budget", "mark", "used")

    def __init__(self, budget: int, spent: int = 0) -> None:
        """`spent`: what earlier runs have spent of the budget."""
        nearly = -(-budget * _WARN_NUMERATOR // _WARN_DENOMINATOR)
        self.budget = budget
        self.mark = max(0, nearly - spent)
        self.used = max(nearly, spent)


class Pipe:
    """The supervisor's end of a pipe that is the program's stdout or stderr, for this run only."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.ended = False
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)
        try:
            fcntl.fcntl(self.write_fd, F_SETPIPE_SZ, _PIPE_BYTES)
        except OSError:
            pass  # a smaller pipe is only slower

    def read(self) -> bytes:
        """What is there now; empty when nothing is, for now or (`ended`) for good."""
        try:
            data = os.read(self.read_fd, 65536)
        except BlockingIOError:
            return b""
        self.ended = not data
        return data

    def close(self) -> None:
        os.close(self.read_fd)


class Call:
    """An open tool call: of which tool, by which id the interpreter waits for its answer, and how large it is."""

    __slots__ = ("name", "size", "waiting_id")

    def __init__(self, name: str, waiting_id: str, size: int) -> None:
        self.name = name
        self.waiting_id = waiting_id
        self.size = size


class Run:
    """State of one run. The supervisor owns it and acts on it."""

    def __init__(self, execution_id: str, source: str, settings: Settings, number: int, channel: Channel) -> None:
        self.execution_id = execution_id
        self.source = source
        self.settings = settings
        self.number = number
        self.filename = f"<execution-{number}>" if execution_id else "<prelude>"
        self.phase = Phase.CHECKING
        self.started = time.monotonic()
        self.deadline = self.started + settings.wall_time_s
        self.check_began = self.started
        self.alone = False  # it is checked while everything else stands still
        self.kill_at: Optional[float] = None
        self.ended_by: Optional[str] = None  # the outcome, when the supervisor decided on it
        self.logs = LogRelay(channel, execution_id, settings.output_bytes)
        self.pipes: list[Pipe] = []
        self.calls: dict[str, Call] = {}  # open tool calls, by the id that the client answers
        self.calls_made = 0
        self.final_call_id = ""
        self.images = 0
        self.images_bytes = 0
        self.output: Union[bytes, int, None] = None  # packed, or a sealed memory file
        self.output_size = 0
        self.operations = 0
        self.budget = 0  # operations that it may spend
        self.warnings: dict[str, Warning] = {}  # not told yet, by limit
        self.imports: list[str] = []  # modules that its source imports
        self.cpu: Optional[CpuMeter] = None  # from when its code starts
        self.cpu_time_s = 0.0
        self.peak_memory_bytes = 0
        self.oom_suspect = False
        self.artifacts: Optional[Artifacts] = None  # from when its code starts; not of the prelude
        self._held = False  # what it says can't be taken on
        self._paused_at: Optional[float] = None  # from where on it is not settled yet how long it waited
        self._paused_cpu_s = 0.0  # what it had spent by then
        self._paused_s = 0.0

    @property
    def visible(self) -> bool:
        return bool(self.execution_id)

    def take_image(self, size: int) -> str:
        """Counts an image that is to be sent; why it must be left out instead, if it must."""
        if self.images >= IMAGES_MAX:
            return f"an execution shows at most {IMAGES_MAX} images"
        if size > IMAGE_BYTES_MAX:
            return f"an image has at most {IMAGE_BYTES_MAX} bytes"
        if self.images_bytes + size > IMAGES_BYTES_MAX:
            return f"the images of an execution have at most {IMAGES_BYTES_MAX} bytes together"
        self.images += 1
        self.images_bytes += size
        return ""

    def why_no_call(self, size: int) -> str:
        """Why a call with so many bytes of arguments can't be opened now, if it can't."""
        if len(self.calls) >= TOOL_CALLS_OPEN_MAX:
            return f"at most {TOOL_CALLS_OPEN_MAX} tool calls can be open at a time"
        if sum(each.size for each in self.calls.values()) + size > TOOL_ARGUMENTS_BYTES_MAX:
            return f"the arguments of open tool calls have at most {TOOL_ARGUMENTS_BYTES_MAX} bytes together"
        return ""

    @property
    def check_deadline(self) -> float:
        return self.check_began + CHECK_TIME_S

    def open_call(self, call: Call) -> str:
        """Takes note of a call; its id is ours, since what the program calls it may be nothing that travels."""
        self.calls_made += 1
        call_id = f"c{self.calls_made}"
        self.calls[call_id] = call
        self._set_clock()
        return call_id

    def close_call(self, call_id: str) -> Call:
        call = self.calls.pop(call_id)
        self._set_clock()
        return call

    def hold(self, held: bool) -> None:
        """While nobody takes what it says, the program is made to wait, and its time does not count."""
        self._held = held
        self._set_clock()

    def _set_clock(self) -> None:
        """Stops its clock while it waits for the client, or for the daemon, and lets it go on."""
        waits = self._held or bool(self.calls)
        if waits and self._paused_at is None:
            self._paused_at, self._paused_cpu_s = time.monotonic(), self._spent_s()
        elif not waits:
            self.settle_pause()
            self._paused_at = None

    def settle_pause(self) -> None:
        """Takes the time that it has waited since this was asked last off its clock. To be called now and then.

        Only what waits altogether waits: while one thread is in a tool call, others may run. So the clock goes on by
        what CPU time is spent meanwhile, at most as fast as time.
        """
        if self._paused_at is not None:
            now, spent_s = time.monotonic(), self._spent_s()
            waited_s = max(0.0, now - self._paused_at - max(0.0, spent_s - self._paused_cpu_s))
            self.deadline += waited_s
            self._paused_s += waited_s
            self._paused_at, self._paused_cpu_s = now, spent_s

    def _spent_s(self) -> float:
        return self.cpu.spent_s() if self.cpu is not None else 0.0

    @property
    def wall_deadline(self) -> float:
        """When its time is up; while it waits for others, never unless it is by now."""
        return self.deadline if self._paused_at is None or self.deadline <= self._paused_at else float("inf")

    def wall_time_s(self) -> float:
        """Time run so far, waiting for others left out."""
        now = time.monotonic()
        paused = self._paused_s + (now - self._paused_at if self._paused_at is not None else 0.0)
        return now - self.started - paused

    def limit_error(self, detail: Optional[dict[str, Any]]) -> Optional[dict[str, Any]]:
        """The error of a run that the supervisor ended, with where the program was if it could still say."""
        settings = self.settings
        said = {
            "timeout": ("TimeoutError", f"the execution took longer than wall_time_s = {settings.wall_time_s:g}"),
            "cpu_limit": ("TimeoutError", f"the execution used more than cpu_time_s = {settings.cpu_time_s:g}"),
            "output_limit": (
                "OutputLimit",
                f"the execution printed far more than output_bytes = {settings.output_bytes}",
            ),
            "out_of_memory": ("MemoryError", "the program used more memory than memory_bytes allows"),
            "cancelled": ("Cancelled", "the execution was cancelled"),
        }
        type_name, message = said[self.ended_by or ""]
        where = {key: value for key, value in (detail or {}).items() if key in ("traceback", "line", "statement")}
        if where.get("traceback"):
            # The lines are where the program was; the last one, what interrupted it, is ours to say.
            where["traceback"] = "\n".join([*where["traceback"].rstrip().split("\n")[:-1], f"{type_name}: {message}\n"])
        return error(type_name, message, **where)

    def close(self) -> None:
        """Closes what is still open of the run."""
        for pipe in self.pipes:
            pipe.close()
        self.pipes = []
        if isinstance(self.output, int):
            os.close(self.output)
        self.output = None


def error(type_name: str, message: str, **more: Any) -> dict[str, Any]:
    """An error detail as it travels."""
    return {"type": type_name, "message": message, **more}


def read_error(data: bytes) -> dict[str, Any]:
    """The error with which a program says it ended, every field checked. Raises FrameError."""
    if len(data) > MAX_ERROR_BYTES:
        raise FrameError(f"an error of {len(data)} bytes")
    try:
        values = loads(data)
    except (ValueError, RecursionError) as problem:
        raise FrameError("an error that is not JSON") from problem
    if not isinstance(values, dict):
        raise FrameError("an error that is not an object")
    fields = Fields(values)
    read = error(
        fields.text("type", 256),
        fields.text("message", 16_384),
        traceback=fields.text("traceback", 32_768, default=""),
        line=fields.integer("line", 0, 2**31 - 1, default=0),
        statement=fields.text("statement", 16_384, default=""),
    )
    if "exit_code" in fields:
        read["exit_code"] = fields.integer("exit_code", 0, 255)
    return read
