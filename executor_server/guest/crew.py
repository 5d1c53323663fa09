"""The interpreter and the checker: started, spoken to, replaced.

Both are forked from the supervisor. What they say is handed on as it comes; a link that is closed or abused costs the
child its life, and its exit is reported like any other, where children are reaped.
Until somebody uses the interpreter, a spare that has imported modules ahead can take its place (spare.py).
"""

from __future__ import annotations

import os
import time

from . import link
from .children import Child, ChildStuck, continue_everything, end_child, kill_everything, reap, spawn, stop_everything
from .frames import FrameError
from .lean import signal, socket
from .loop import READ, WRITE, Loop
from .spare import Spare
from .transfers import MAX_BLOB_BYTES
from .usage import Process, process_cpu_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

# After so many sources the checker is replaced: what hostile sources left in its memory goes with it.
_CHECKER_USES = 200
# Starting it again takes a millisecond or two.
_CHECKER_REST_S = 10.0
# Messages that do not use an interpreter. The last of each kind holds for a spare that takes its place, too, but for
# the question which modules are there once that is answered.
_SET_UP = ("settings", "tools", "find")


class Config:
    """What the guest is told at its start."""

    __slots__ = (
        "cpu_counter",
        "mark",
        "memory_bytes",
        "orphan_time_s",
        "preload",
        "processes",
        "token_hash",
        "watch_memory",
        "workspace",
    )

    def __init__(
        self,
        token_hash: str,
        workspace: str,
        orphan_time_s: float,
        memory_bytes: int,
        processes: int,
        watch_memory: bool,
        preload: list[str],
        mark: str,
        cpu_counter: Optional[int] = None,
    ) -> None:
        self.token_hash = token_hash
        self.workspace = workspace
        self.orphan_time_s = orphan_time_s
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.watch_memory = watch_memory
        self.preload = preload  # modules that the interpreter imports before anybody asks
        self.cpu_counter = cpu_counter  # a file of the sandbox's control group that is kept open, if it has one
        self.mark = mark  # random: what the checker leaves in code objects for the interpreter to replace


class Programs:
    """What the children run, given their end of the link. `load` imports it."""

    __slots__ = ("checker", "interpreter", "load")

    def __init__(
        self,
        load: Callable[[], None],
        interpreter: Callable[[socket.socket, Config, list[str]], None],
        checker: Callable[[socket.socket, Config], None],
    ) -> None:
        self.load = load
        self.interpreter = interpreter
        self.checker = checker


class Listener:
    """Where the crew's news go."""

    __slots__ = ("on_checker_exit", "on_interpreter_exit", "on_message", "on_verdict")

    def __init__(
        self,
        on_message: Callable[[link.Message], None],
        on_verdict: Callable[[link.Message], None],
        on_interpreter_exit: Callable[[int], None],
        on_checker_exit: Callable[[int], None],
    ) -> None:
        self.on_message = on_message
        self.on_verdict = on_verdict
        self.on_interpreter_exit = on_interpreter_exit
        self.on_checker_exit = on_checker_exit


class Crew:
    """Owns both children. `abandon` closes, in a fresh child, what else belongs to the supervisor."""

    def __init__(
        self, config: Config, loop: Loop, programs: Programs, listener: Listener, abandon: Callable[[], None]
    ) -> None:
        self._config = config
        self._loop = loop
        self._programs = programs
        self._listener = listener
        self._abandon_others = abandon
        self._interpreter: Optional[Child] = None
        self._checker: Optional[Child] = None
        self._checker_uses = 0
        self._checker_cpu_s = 0.0  # when it was given its last source
        self._held = False  # everything but the checker is stopped
        self._checker_used_at = float("inf")  # never yet: whoever comes first finds it ready
        self._measured: Optional[Process] = None
        self._paused = False
        self._used = False  # whether the interpreter has been asked for anything yet
        self._set_up: dict[str, tuple[dict[str, Any], bytes]] = {}  # what an interpreter is told before it is used

        def run_spare(sock: socket.socket, modules: list[str]) -> None:
            programs.interpreter(sock, config, modules)

        self._spare = Spare(loop, config.preload, run_spare, self._receive, self._take_spare)

    @property
    def interpreter(self) -> Process:
        """To be measured. The last one while there is no other."""
        assert self._measured is not None
        return self._measured

    @property
    def started(self) -> bool:
        return self._interpreter is not None

    @property
    def imports_ahead(self) -> bool:
        """Whether another interpreter may yet take the place of this one, which nobody has used so far."""
        return self.started and not self._used and self._spare.useful

    def start(self) -> None:
        self._programs.load()  # once, here, and not by each of them: a fork shares what is loaded
        self._used = False
        self._set_up.pop("find", None)
        self._set_interpreter(self._fork(lambda sock, config: self._programs.interpreter(sock, config, [])))
        self._start_checker()

    def replace(self) -> None:
        """Kills everything in the sandbox and starts both anew."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Kills everything in the sandbox."""
        for child in (self._interpreter, self._checker):
            if child is not None:
                self._forget(child)
        self._interpreter = self._checker = None
        self._held = False
        self._spare.forget()
        kill_everything()

    def pause(self, paused: bool) -> None:
        """Stops listening to the interpreter, which will wait once its link is full, or starts again."""
        if paused != self._paused:
            self._paused = paused
            self._watch_interpreter()

    # -- speaking ------------------------------------------------------------------------------------------------

    def post(
        self, head: dict[str, Any], body: bytes = b"", memfd: Optional[int] = None, fds: tuple[int, ...] = ()
    ) -> None:
        """Sends the interpreter a message; takes over the descriptors."""
        assert self._interpreter is not None
        if head["t"] in _SET_UP:
            self._set_up[head["t"]] = head, body
        else:
            self._claim()
        try:
            self._interpreter.post(head, body, memfd, fds)
        except ChildStuck:
            self._kill(self._interpreter)
        if self._interpreter.blocked:
            self._watch_interpreter()

    def interrupt(self) -> None:
        if self._interpreter is not None:
            os.kill(self._interpreter.pid, signal.SIGINT)

    def check(self, head: dict[str, Any], body: bytes) -> None:
        """Sends the checker a source."""
        self._claim()  # before it is measured what running this source takes
        if self._checker is None:
            self._start_checker()
        assert self._checker is not None
        self._checker_uses += 1
        self._checker_used_at = time.monotonic()
        self._checker_cpu_s = process_cpu_s(self._checker.pid)
        try:
            self._checker.post(head, body)
        except ChildStuck:
            self._kill(self._checker)

    def renew_checker(self, *, only_if_worn: bool = False) -> None:
        """Ends the checker, whatever it does, and starts another."""
        if only_if_worn and self._checker_uses < _CHECKER_USES:
            return
        if self._checker is not None:
            self._kill(self._checker)
            self._forget(self._checker)
            self._checker = None
        self._start_checker()

    def check_cpu_s(self) -> float:
        """Processor time that the checker has spent on the source at hand."""
        return process_cpu_s(self._checker.pid) - self._checker_cpu_s if self._checker is not None else 0.0

    def hold(self) -> None:
        """Stops everything in the sandbox, until `release`, but a new checker."""
        if self._checker is not None:
            self._forget(self._checker)
            end_child(self._checker)
            self._checker = None
        self._held = True
        stop_everything()
        self._start_checker()

    def release(self) -> None:
        if self._held:
            self._held = False
            continue_everything()

    @property
    def rests_at(self) -> float:
        """When `rest` is worth calling, if nothing is asked of it until then."""
        return self._checker_used_at + _CHECKER_REST_S if self._checker is not None else float("inf")

    def rest(self) -> None:
        """Ends the checker, which nobody has needed for a while: a third of an idle sandbox's memory is in it."""
        if self._checker is not None:
            self._forget(self._checker)
            end_child(self._checker)
            self._checker = None

    # -- listening -----------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Takes note of every child that has ended, and ends a checker that was stopped: that was agent code."""
        for pid, status in reap():
            if os.WIFSTOPPED(status):
                if self._checker is not None and pid == self._checker.pid:
                    self._kill(self._checker)  # its end comes here next
            elif self._interpreter is not None and pid == self._interpreter.pid:
                self._forget(self._interpreter)
                self._interpreter = None
                self._listener.on_interpreter_exit(status)
            elif self._checker is not None and pid == self._checker.pid:
                self._forget(self._checker)
                self._checker = None
                self._listener.on_checker_exit(status)
            elif self._spare.note_exit(pid):
                self._start_spare()

    def _on_interpreter(self, events: int) -> None:
        child = self._interpreter
        assert child is not None
        if events & WRITE:
            self._flush(child)
            self._watch_interpreter()
        self._receive(child, self._on_message)

    def _on_message(self, message: link.Message) -> None:
        kind = message.head.values.get("t")
        if kind == "op_done":
            self._set_up.pop("find", None)
        self._listener.on_message(message)
        if kind == "booted":
            self._start_spare()

    def _on_checker(self, events: int) -> None:
        child = self._checker
        assert child is not None
        if events & WRITE:
            self._flush(child)
        self._watch_checker()
        self._receive(child, self._listener.on_verdict)

    def _receive(self, child: Child, take: Callable[[link.Message], None]) -> None:
        if child.given_up:
            return
        try:
            message = link.receive(child.sock, MAX_BLOB_BYTES)
        except BlockingIOError:
            return
        except (link.LinkClosed, FrameError):
            self._kill(child)  # closed or abused by agent code
            return
        try:
            take(message)
        except (ValueError, KeyError, TypeError, RecursionError):  # FrameError, and what odd JSON leads to
            self._kill(child)
        finally:
            message.close()

    def _flush(self, child: Child) -> None:
        try:
            child.flush()
        except ChildStuck:
            self._kill(child)

    # -- the spare -----------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """The interpreter that is there will be used: it stays."""
        self._used = True
        self._spare.end()

    def _start_spare(self) -> None:
        if not self._used:
            self._spare.start(self._abandon)

    def _take_spare(self, spare: Child, booted: link.Message) -> None:
        """Puts it in the place of the interpreter that nobody has used."""
        assert self._interpreter is not None
        self._forget(self._interpreter)
        end_child(self._interpreter)
        self._used = True
        self._set_interpreter(spare)
        for head, body in self._set_up.values():
            self.post(head, body)
        self._listener.on_message(booted)

    # -- the children --------------------------------------------------------------------------------------------

    def _fork(self, main: Callable[[socket.socket, Config], None]) -> Child:
        """Forks a child. When no process is left for it, whatever fills the sandbox has to go."""

        def target(sock: socket.socket) -> None:
            main(sock, self._config)

        try:
            return spawn(target, self._abandon)
        except OSError:
            kill_everything()
            return spawn(target, self._abandon)

    def _abandon(self) -> None:
        """In a forked child: closes all that belongs to the supervisor."""
        self._loop.close()
        for child in (self._interpreter, self._checker):
            if child is not None:
                child.close()
        self._spare.close()
        if self._measured is not None:
            self._measured.close()
        self._abandon_others()

    def _set_interpreter(self, child: Child) -> None:
        self._interpreter = child
        if self._measured is not None:
            self._measured.close()
        self._measured = Process(child.pid)
        self._watch_interpreter()

    def _start_checker(self) -> None:
        self._checker = self._fork(self._programs.checker)
        self._checker_uses = 0
        self._watch_checker()

    def _watch_checker(self) -> None:
        if self._checker is not None and not self._checker.given_up:
            events = READ | WRITE if self._checker.blocked else READ
            self._loop.watch(self._checker.sock.fileno(), events, self._on_checker)

    def _watch_interpreter(self) -> None:
        child = self._interpreter
        if child is not None and not child.given_up:
            events = 0 if self._paused else READ
            if child.blocked:
                events |= WRITE
            self._loop.watch(child.sock.fileno(), events, self._on_interpreter)

    def _forget(self, child: Child) -> None:
        self._loop.watch(child.sock.fileno(), 0, None)
        child.close()

    def _kill(self, child: Child) -> None:
        """Ends a child, and listens to it no more: what it has said meanwhile is worth nothing."""
        child.given_up = True
        self._loop.watch(child.sock.fileno(), 0, None)
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # dead already; it is about to be reaped
