"""Background work: processes, ports and file watches, which run next to executions and which most sessions never use.

Each of the three is imported and made with its first request: their modules would add 4 ms to the start of a sandbox.
"""

from __future__ import annotations

import math

from ..wire import rlimits
from ..wire.frames import Kind
from ..wire.schema import message_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from ..ports.connections import Connections
    from ..processes.table import Processes
    from ..watches.watches import Watches
    from ..wire.frames import Frame
    from ..wire.guest_channel import Channel
    from ..wire.loop import Loop
    from .config import Config
    from .leftover_output import LeftoverOutput

PROCESS_KINDS = range(Kind.START_PROCESS, Kind.FORGET_PROCESS + 1)
_FIRST, _LAST = Kind.START_PROCESS, Kind.NEXT_CHANGES
_NO_LEADERS: frozenset[int] = frozenset()


class BackgroundWork:
    """Passes frames on to the three. `leftover` takes the pipes that are still open after a process has ended."""

    def __init__(self, config: Config, channel: Channel, loop: Loop, leftover: LeftoverOutput) -> None:
        self._config = config
        self._channel = channel
        self._loop = loop
        self._leftover = leftover
        self._processes: Optional[Processes] = None
        self._ports: Optional[Connections] = None
        self._watches: Optional[Watches] = None

    def take(self, frame: Frame) -> bool:
        """Does what a frame requests; false when it is for another part. Raises FrameError."""
        kind = frame.kind
        if not _FIRST <= kind <= _LAST:
            return False
        if kind in PROCESS_KINDS:
            self._take_process(frame)
        elif kind <= Kind.CLOSE_PORT:
            self._take_port(frame)
        else:
            self._take_watch(frame)
        return True

    def _take_process(self, frame: Frame) -> None:
        from ..processes import table

        if self._processes is None:
            self._processes = table.Processes(
                self._channel, self._loop, self._leftover.adopt, self._environment, self._limit
            )
            self._processes.pause(self._channel.full)
        request = message_of(frame)
        assert isinstance(request, table.REQUESTS)
        self._processes.take(request, frame.body)

    def _environment(self, own: dict[str, str]) -> dict[str, str]:
        from ..processes.environment import process_environment

        config = self._config
        return process_environment(own, config.variables, has_environment=config.has_environment)

    def _limit(self) -> None:
        """Limits the calling process, which is about to run a command."""
        config = self._config
        rlimits.limit_program(config.memory_bytes if config.watch_memory else None, config.processes)

    def _take_port(self, frame: Frame) -> None:
        from ..ports import connections

        if self._ports is None:
            self._ports = connections.Connections(self._channel, self._loop)
            self._ports.pause(self._channel.full)
        request = message_of(frame)
        assert isinstance(request, connections.REQUESTS)
        self._ports.take(request, frame.body)

    def _take_watch(self, frame: Frame) -> None:
        from ..watches import watches

        if self._watches is None:
            self._watches = watches.Watches(self._channel, self._loop, self._config.workspace)
        request = message_of(frame)
        assert isinstance(request, watches.REQUESTS)
        self._watches.take(request)

    # -- the supervisor's loop -----------------------------------------------------------------------------------

    @property
    def due(self) -> float:
        """The time of the next call of `on_time`."""
        processes_due = math.inf if self._processes is None else self._processes.due
        return processes_due if self._watches is None else min(processes_due, self._watches.due)

    def on_time(self, now: float) -> None:
        if self._processes is not None:
            self._processes.on_time(now)
        if self._watches is not None:
            self._watches.on_time(now)

    def pause(self, paused: bool) -> None:
        """Stops reading while the daemon takes no events, or starts again."""
        if self._processes is not None:
            self._processes.pause(paused)
        if self._ports is not None:
            self._ports.pause(paused)

    def on_new_daemon(self) -> None:
        """Ends connections and watches of the last daemon; processes continue."""
        if self._ports is not None:
            self._ports.reset_all()
        if self._watches is not None:
            self._watches.end_all()

    # -- processes, for those parts that measure and kill ----------------------------------------------------------

    @property
    def leaders(self) -> frozenset[int]:
        """The kernel sessions of the processes that run."""
        return _NO_LEADERS if self._processes is None else self._processes.leaders

    @property
    def ended_cpu_s(self) -> float:
        """The CPU seconds of the processes that have ended."""
        return 0.0 if self._processes is None else self._processes.ended_cpu_s

    def cpu_s(self) -> float:
        """Returns the CPU seconds that all processes have spent so far."""
        return 0.0 if self._processes is None else self._processes.cpu_s()

    def note_exit(self, pid: int, status: int, usage: Any) -> bool:
        """Notes that a process of the sandbox was reaped; true if a call had started it."""
        return self._processes is not None and self._processes.note_exit(pid, status, usage)
