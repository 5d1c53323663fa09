"""The processes that calls have started in this sandbox, by their ids, and all requests about them.

An ended process stays known until the daemon says to forget it: a daemon that was killed before it recorded a start
requests it again, and must not start the process twice.
"""

from __future__ import annotations

from ..wire.frames import FrameError
from ..wire.process_messages import ForgetProcess, GrantOutput, ResizeProcess, SignalProcess, StartProcess, WriteProcess
from . import sessions
from .environment import is_text, read_variables
from .start import Command, NotStarted
from .supervised_process import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

    from ..wire.guest_channel import Channel
    from ..wire.loop import Loop
    from .pipe import Pipe

    ProcessRequest = Union[StartProcess, WriteProcess, ResizeProcess, SignalProcess, GrantOutput, ForgetProcess]

REQUESTS = (StartProcess, WriteProcess, ResizeProcess, SignalProcess, GrantOutput, ForgetProcess)
# Processes known at one time, including ended ones; the daemon allows far fewer.
_MAX_KNOWN = 1024
SIGKILL = 9


class Processes:
    """Owns the processes. `adopt` takes pipes that others still have open when a process has ended.

    `environment` completes the environment variables that a process was given; `limit` is called in a new process.
    """

    def __init__(
        self,
        channel: Channel,
        loop: Loop,
        adopt: Callable[[list[Pipe]], None],
        environment: Callable[[dict[str, str]], dict[str, str]],
        limit: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._loop = loop
        self._adopt = adopt
        self._environment = environment
        self._limit = limit
        self._known: dict[str, Optional[Process]] = {}  # None: it has ended
        self._live: dict[str, Process] = {}  # processes that have not ended
        self._running: dict[int, Process] = {}  # live processes that were not reaped, by pid
        self._paused = False
        self.ended_cpu_s = 0.0
        """The CPU seconds of the reaped processes, with the children that they waited for."""

    @property
    def leaders(self) -> frozenset[int]:
        """The kernel sessions of the processes that run."""
        return frozenset(self._running)

    @property
    def due(self) -> float:
        """Time for the next call of `on_time`."""
        return min((each.due_s for each in self._live.values()), default=float("inf"))

    def cpu_s(self) -> float:
        """Returns the CPU seconds of all of them so far."""
        return self.ended_cpu_s + (sessions.cpu_s(self._running.keys()) if self._running else 0.0)

    def on_time(self, now: float) -> None:
        if self._live and now >= self.due:
            for process in [each for each in self._live.values() if each.due_s <= now]:
                process.on_time(now)

    def pause(self, paused: bool) -> None:
        """Stops reading output while the daemon takes none, or starts again."""
        if paused != self._paused:
            self._paused = paused
            for process in tuple(self._live.values()):
                process.pause(paused)

    # -- requests ------------------------------------------------------------------------------------------------

    def take(self, request: ProcessRequest, body: bytes) -> None:
        """Handles a request of the daemon. Raises FrameError."""
        if isinstance(request, StartProcess):
            self._start(request, body)
            return
        process = self._known.get(request.id)
        if isinstance(request, ForgetProcess):
            if process is None:
                self._known.pop(request.id, None)
        elif isinstance(request, GrantOutput):
            if process is not None:
                process.grant(request.granted)
        elif request.id not in self._known:
            self._channel.fail(request.op, "no_such_process", "there is no such process")
        elif isinstance(request, WriteProcess):
            if process is None:
                self._channel.fail(request.op, "input_closed", "the process has ended")
            else:
                process.write(request, body)
        else:
            if process is not None and isinstance(request, ResizeProcess):
                process.resize(request.columns, request.rows)
            elif process is not None and isinstance(request, SignalProcess):
                self._signal(process, request)
            self._channel.done(request.op)

    def _start(self, request: StartProcess, body: bytes) -> None:
        command = self._command(request, body)
        if request.id in self._known:
            self._channel.done(request.op)
            return
        if len(self._known) >= _MAX_KNOWN:
            self._channel.fail(request.op, "queue_full", f"{_MAX_KNOWN} processes are known here")
            return
        process = Process(request, self._channel, self._loop, self)
        try:
            process.start(command, self._limit)
        except NotStarted as failure:
            self._channel.fail(request.op, failure.reason, failure.message)
            return
        except OSError as error:
            self._channel.fail(request.op, "no_process", f"no further process can be started: {error.strerror}")
            return
        self._known[request.id] = self._live[request.id] = process
        self._running[process.pid] = process
        process.pause(self._paused)

    def _command(self, request: StartProcess, body: bytes) -> Command:
        if request.argv > len(body):
            raise FrameError(f"arguments of {request.argv} bytes in a body of {len(body)}")
        try:
            *argv, rest = body[: request.argv].decode().split("\0")
        except UnicodeDecodeError as error:
            raise FrameError("a command that is not UTF-8") from error
        if rest or not argv or not all(map(is_text, argv)):
            raise FrameError("a command that is not a list of texts")
        if not is_text(request.cwd):
            raise FrameError("a directory name that the system refuses")
        env = read_variables(body[request.argv :])
        if request.columns is not None:
            env.setdefault("TERM", "xterm-256color")
        env = self._environment(env)
        return Command(argv, request.cwd or ".", env, prefers_bash=request.prefers_bash)

    def _signal(self, process: Process, request: SignalProcess) -> None:
        if process.exited:
            return  # its pid may belong to another process
        if request.target == "process":
            sessions.send(process.pid, request.signal)
        elif request.target == "group":
            sessions.send_group(process.pid, request.signal)
        elif request.signal == SIGKILL:
            process.kill()
        else:
            sessions.signal_session(process.pid, request.signal)

    # -- ends ----------------------------------------------------------------------------------------------------

    def note_exit(self, pid: int, status: int, usage: Any) -> bool:
        """Notes that a child was reaped, with its wait status and resource usage; false if it is none of these."""
        process = self._running.pop(pid, None)
        if process is None:
            return False
        self.ended_cpu_s += usage.ru_utime + usage.ru_stime
        process.note_exit(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
        return True

    def on_ended(self, process: Process, left: list[Pipe]) -> None:
        self._known[process.process_id] = None
        del self._live[process.process_id]
        self._adopt(left)
