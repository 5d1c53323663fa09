"""Starts the interpreter and the checker, sends them messages, and replaces them.

Both are forked from the supervisor. Agent code has their uid, so it can kill or stop either, and send messages over the
interpreter's link. Three rules follow:

- A child whose link is closed or abused is killed. Whatever ends a child, its exit is reported to the supervisor in one
  place, where children are reaped. A second path could report an exit twice or not at all.
- After the kill nothing more is read from its link. Messages in it may be forged, and one that ends a run would be
  taken for the end of the next run.
- A stopped checker is killed at once, and the source is checked again, alone (checking.py). The attack is SIGSTOP: it
  costs nothing, and the source would wait for its deadline.

Until the interpreter is used, a warm one with preloaded modules can replace it (warm_interpreter.py).
"""

from __future__ import annotations

import contextlib
import os
import time

from ..files.transfers import MAX_BLOB_BYTES
from ..wire import link
from ..wire.frames import FrameError
from ..wire.lean import signal, socket
from ..wire.link_messages import Answered, Booted, Check, FindModules, PlaceTools, SetRules, message_of
from ..wire.loop import READ, WRITE, Loop
from .checking import CHECKER_REST_S, CHECKER_START_S
from .child import (
    Child,
    ChildStuck,
    await_end,
    continue_everything,
    end_child,
    kill_but,
    kill_everything,
    reap,
    spawn,
    stop_everything,
)
from .usage import Process, process_cpu_s
from .warm_interpreter import WarmInterpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Protocol

    from ..wire.link_messages import LinkMessage
    from .background_work import BackgroundWork
    from .config import Config, Programs
    from .copies import KeptCopies

    class Owner(Protocol):
        """The supervisor, to which messages and exits are reported."""

        def on_message(self, packet: link.Packet) -> None: ...

        def on_interpreter_exit(self, status: int) -> None: ...

        def on_verdict(self, packet: link.Packet) -> None: ...

        def on_checker_exit(self, status: int) -> None: ...


# The checker is replaced after this number of sources, since a hostile one may have left something in its memory.
_CHECKER_USES = 200
# Messages that do not count as use of an interpreter. A warm one that replaces it gets the last of each kind, too;
# FindModules only until it is answered.
_SET_UP = (SetRules, PlaceTools, FindModules)


class ChildProcesses:
    """Owns both children, and reports their messages and exits to the supervisor.

    Processes that calls have started (`background`) and savepoints (`copies`) outlive an interpreter.
    """

    def __init__(
        self,
        config: Config,
        loop: Loop,
        programs: Programs,
        owner: Owner,
        background: BackgroundWork,
        copies: KeptCopies,
    ) -> None:
        self._config = config
        self._loop = loop
        self._programs = programs
        self._owner = owner
        self._background = background
        self._copies = copies
        self._interpreter: Optional[Child] = None
        self._checker: Optional[Child] = None
        self._checker_uses = 0
        self._checker_cpu_s = 0.0  # when it got its last source
        self._held = False  # everything but the checker is stopped
        self.due = float("inf")  # when to call `on_due`, which ends the idle checker or starts one
        self.serves = False  # a session has this sandbox, so a source may come
        self._measured: Optional[Process] = None
        self._trunk: Optional[tuple[Child, Process]] = None  # the interpreter that waits while a branch is in its place
        self._before_branch: frozenset[int] = frozenset()  # kernel sessions that outlive the branch
        self.trunk_ended = False  # the interpreter that waits, or waited last, has ended
        self._unreported: list[tuple[int, int, Any]] = []  # the exits of processes that `_fork` has killed
        self._paused = False
        self._ending = False  # true while processes that `stop` has killed may not have ended
        self._booted = False  # true once the interpreter has reported it
        self._used = False  # true once a message that uses the interpreter was sent
        self._set_up: dict[type[LinkMessage], tuple[LinkMessage, bytes]] = {}  # the last of each kind in _SET_UP
        self._warm = WarmInterpreter(
            *(loop, config.preload, lambda sock, modules: programs.interpreter(sock, config, modules)),
            *(self._receive, self._take_warm),
        )

    @property
    def interpreter(self) -> Process:
        """The interpreter's process, for measuring; between two interpreters, the last one."""
        assert self._measured is not None
        return self._measured

    @property
    def started(self) -> bool:
        return self._interpreter is not None

    @property
    def closed(self) -> frozenset[int]:
        """Processes that others can't read: the checker, and interpreters that have not booted."""
        starting = (self._checker, self._warm.child, None if self._booted else self._interpreter)
        return frozenset(child.pid for child in starting if child is not None)

    @property
    def imports_ahead(self) -> bool:
        """True while a warm interpreter may still replace this one, which is unused."""
        return self.started and not self._used and self._warm.useful

    def start(self) -> None:
        self._programs.load()  # before the forks, which share the loaded modules
        self._used = self._booted = False
        self._set_up.pop(FindModules, None)
        self._set_interpreter(self._fork(lambda sock, config: self._programs.interpreter(sock, config, [])))
        if self.serves:
            self.have_checker()

    def serve_session(self) -> None:
        """Schedules a checker: a session has got the sandbox. Before that a checker would only use memory."""
        self.serves = True
        if self.started and self._checker is None:
            self.due = time.monotonic() + CHECKER_START_S

    def set_variables(self, variables: dict[str, str]) -> None:
        """Gives later interpreters the session's environment variables, and replaces this one, which is unused."""
        self._config.variables = variables
        if self._interpreter is not None:
            self._warm.end()
            self._forget(self._interpreter)
            end_child(self._interpreter)  # a process reads many variables at its start only
        self.start()

    def stop(self, *, between_runs: bool = False) -> None:
        """Kills everything in the sandbox but processes of calls and savepoints.

        `between_runs`: spares the idle checker, too, and does not wait; the next use of an interpreter does.
        """
        if self._interpreter is not None:
            self._forget(self._interpreter)
            self._interpreter = None
        if not between_runs:
            self._forget_checker()
        self._held, self._ending = False, between_runs
        self._warm.forget()
        kill_but(self._spared_leaders, self._note_exit, wait=not between_runs)

    def await_end(self) -> None:
        """Waits until the processes that `stop` has killed are gone: then their ports are free."""
        if self._ending and not await_end(self._spared_leaders) and self._interpreter is not None:
            self._kill(self._interpreter)  # its replacement kills all again, more thoroughly
        self._ending = False

    @property
    def _spared_leaders(self) -> frozenset[int]:
        """The kernel sessions that outlive an interpreter or a branch."""
        children = frozenset(child.pid for child in (self._interpreter, self._checker) if child is not None)
        copies = self._copies.pids(self._measured.pid if self._measured is not None else 0)
        return children | copies | self._background.leaders | self._before_branch

    def adopt(self, child: Child) -> None:
        """Makes the process of a savepoint the interpreter. Call `stop` first."""
        self._used = self._booted = True
        self._set_interpreter(child)

    # -- branches ------------------------------------------------------------------------------------------------

    @property
    def on_branch(self) -> bool:
        """True while a branch is in the place of the interpreter."""
        return self._trunk is not None

    def enter_branch(self, branch: Child) -> None:
        """Puts a branch in the place of the interpreter, which waits; its link is not read meanwhile."""
        from ..processes import sessions

        trunk, measured = self._interpreter, self._measured
        assert trunk is not None and measured is not None, "a branch of no interpreter"
        self._loop.watch(trunk.sock.fileno(), 0, None)
        self._before_branch = sessions.leaders() - {branch.pid}
        self._trunk, self.trunk_ended = (trunk, measured), False
        self._interpreter, self._measured = branch, Process(branch.pid)
        self._watch_interpreter()

    def leave_branch(self) -> bool:
        """Kills the branch and what it started, and puts the interpreter back. False if the interpreter has ended."""
        assert self._trunk is not None and self._measured is not None
        if self._interpreter is not None:
            self._forget(self._interpreter)
        self._measured.close()
        self._interpreter, self._measured = self._trunk
        self._watch_interpreter()
        self.rest()
        survived = kill_but(self._spared_leaders, self._note_exit)
        self._trunk, self._before_branch = None, frozenset()
        return survived and not self.trunk_ended

    def pause(self, paused: bool) -> None:
        """Stops reading the interpreter's link, so that it blocks once the link is full, or starts again."""
        if paused != self._paused:
            self._paused = paused
            self._watch_interpreter()

    # -- sending -------------------------------------------------------------------------------------------------

    def post(
        self, message: LinkMessage, body: bytes = b"", memfd: Optional[int] = None, fds: tuple[int, ...] = ()
    ) -> None:
        """Sends the interpreter a message; takes over the descriptors."""
        assert self._interpreter is not None
        if isinstance(message, _SET_UP):
            self._set_up[type(message)] = message, body
        else:
            self._claim()
            self.await_end()
        self._unless_stuck(self._interpreter, lambda child: child.post(message, body, memfd, fds))
        if self._interpreter.blocked:
            self._watch_interpreter()

    @property
    def retry_at(self) -> float:
        """The time of the next call of `retry`."""
        return min((child.retry_at for child in (self._interpreter, self._checker) if child), default=float("inf"))

    def retry(self, now: float) -> None:
        """Sends the messages again that the host had no room for."""
        for child in (self._interpreter, self._checker):
            if child is not None and now >= child.retry_at:
                self._unless_stuck(child, Child.flush)
                self._watch_interpreter()
                self._watch_checker()

    def take_back(self, kind: type[LinkMessage]) -> bool:
        """Withdraws a message that the interpreter has not received; false if it has."""
        return self._interpreter is not None and self._interpreter.take_back(kind)

    def interrupt(self, *, with_children: bool = False) -> None:
        """Interrupts the interpreter. `with_children`: its group, too; C code may wait for a child (os.system)."""
        if self._interpreter is not None:
            pid = self._interpreter.pid
            try:
                (os.killpg if with_children else os.kill)(pid, signal.SIGINT)
            except ProcessLookupError:  # it leads no group, or its exit is reported next
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)

    def check(self, message: Check, body: bytes) -> None:
        """Sends the checker a source."""
        self._claim()  # first: the end of a warm interpreter must not be measured with this source
        if self._checker is None:
            self._start_checker()
        assert self._checker is not None
        self._checker_uses += 1
        self.due = time.monotonic() + CHECKER_REST_S
        self._checker_cpu_s = process_cpu_s(self._checker.pid)
        self._unless_stuck(self._checker, lambda child: child.post(message, body))
        self._watch_checker()

    def have_checker(self) -> None:
        """Starts a checker if there is none, before a source needs it, if the process limit has room."""
        if self._checker is None:
            try:
                self._start_checker(makes_room=False)
            except OSError:
                self.due = float("inf")  # no room: the next source makes some

    def renew_checker(self, *, only_if_worn: bool = False) -> None:
        """Ends the checker, whatever it is doing, and starts another if the process limit has room."""
        if only_if_worn and self._checker_uses < _CHECKER_USES:
            return
        self.rest()  # waits for its end: until then it counts towards the process limit
        self.have_checker()

    def check_cpu_s(self) -> float:
        """Returns the CPU seconds that the checker has spent on the current source."""
        return process_cpu_s(self._checker.pid) - self._checker_cpu_s if self._checker is not None else 0.0

    def hold(self) -> None:
        """Stops everything in the sandbox until `release`, and starts a new checker.

        The new checker is forked after the stop, so no running process can have reached it.
        """
        self.rest()
        self._held = True
        stop_everything()
        self._start_checker()

    def release(self) -> None:
        if self._held:
            self._held = False
            continue_everything()

    def on_due(self) -> None:
        """Ends a checker that has been idle for long; starts one for a session if the process limit has room."""
        if self._checker is not None:
            self.rest()
        else:
            self.have_checker()

    def rest(self) -> None:
        """Ends the idle checker, which uses a third of an idle sandbox's memory."""
        if self._checker is not None:
            end_child(self._checker)
            self._forget_checker()

    # -- receiving -----------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Reports ended children, and kills a stopped checker: only agent code stops one."""
        unreported, self._unreported = self._unreported, []
        for pid, status, usage in (*unreported, *reap()):
            if os.WIFSTOPPED(status):
                if self._checker is not None and pid == self._checker.pid:
                    self._kill(self._checker)  # its exit is reaped next
            elif self._interpreter is not None and pid == self._interpreter.pid:
                self._receive(self._interpreter, self._on_last_message)
                self._forget(self._interpreter)
                self._interpreter = None
                self._owner.on_interpreter_exit(status)
            elif self._warm.note_exit(pid):
                self._start_warm()
            elif self._note_exit(pid, status, usage):
                self._owner.on_checker_exit(status)

    def _note_exit(self, pid: int, status: int, usage: Any) -> bool:
        """Notes the end of any process but the interpreters; true if it was the checker."""
        if self._checker is not None and pid == self._checker.pid:
            self._forget_checker()
            return True
        if self._trunk is not None and pid == self._trunk[0].pid:
            self.trunk_ended = True
        elif not self._copies.note_exit(pid):
            self._background.note_exit(pid, status, usage)
        return False

    def _on_interpreter(self, events: int) -> None:
        child = self._interpreter
        assert child is not None
        if events & WRITE:
            self._unless_stuck(child, Child.flush)
            self._watch_interpreter()
        self._receive(child, self._on_message)

    def _on_message(self, packet: link.Packet) -> None:
        message = message_of(packet)
        if isinstance(message, Answered):
            self._set_up.pop(FindModules, None)
        self._owner.on_message(packet)
        if isinstance(message, Booted):
            self._booted = True
            self._start_warm()

    def _on_last_message(self, packet: link.Packet) -> None:
        """Handles an unread message of an ended interpreter, if it reports that the interpreter had started."""
        if isinstance(message_of(packet), Booted):
            self._owner.on_message(packet)

    def _on_checker(self, events: int) -> None:
        child = self._checker
        assert child is not None
        if events & WRITE:
            self._unless_stuck(child, Child.flush)
        self._watch_checker()
        self._receive(child, self._owner.on_verdict)

    def _receive(self, child: Child, take: Callable[[link.Packet], None]) -> None:
        if child.given_up:
            return
        try:
            packet = link.receive(child.sock, MAX_BLOB_BYTES)
        except BlockingIOError:
            return
        except (link.LinkClosed, FrameError):
            self._kill(child)  # agent code has closed or abused it
            return
        try:
            take(packet)
        except FrameError:
            self._kill(child)
        finally:
            packet.close()

    def _unless_stuck(self, child: Child, do: Callable[[Child], None]) -> None:
        try:
            do(child)
        except ChildStuck:
            self._kill(child)

    def _claim(self) -> None:
        """Keeps this interpreter, which is about to be used."""
        if not self._used:  # no other one is preloaded after that
            self._used = True
            self._warm.end()

    def _start_warm(self) -> None:
        if not self._used:
            self._warm.start()

    def _take_warm(self, warm: Child, booted: link.Packet) -> None:
        """Replaces the unused interpreter by the warm one."""
        assert self._interpreter is not None
        self._forget(self._interpreter)
        end_child(self._interpreter)
        self._used = self._booted = True
        self._set_interpreter(warm)
        for message, body in self._set_up.values():
            self.post(message, body)
        self._owner.on_message(booted)

    # -- the children --------------------------------------------------------------------------------------------

    def _fork(self, main: Callable[[socket.socket, Config], None], *, makes_room: bool = True) -> Child:
        """Forks a child. If the process limit has no room and `makes_room`, kills everything in the sandbox first.

        Its caller may be in the middle of a run, so those exits are reported in the next turn of the loop.
        """
        try:
            return spawn(lambda sock: main(sock, self._config))
        except OSError:
            if not makes_room:
                raise
            kill_everything(lambda *ended: self._unreported.append(ended))
            return spawn(lambda sock: main(sock, self._config))

    def _set_interpreter(self, child: Child) -> None:
        self._interpreter = child
        if self._measured is not None:
            self._measured.close()
        self._measured = Process(child.pid)
        self._watch_interpreter()

    def _start_checker(self, *, makes_room: bool = True) -> None:
        self._checker = self._fork(self._programs.checker, makes_room=makes_room)
        self._checker_uses = 0
        self.due = time.monotonic() + CHECKER_REST_S
        self._watch_checker()

    def _forget_checker(self) -> None:
        if self._checker is not None:
            self._forget(self._checker)
            self._checker, self.due = None, float("inf")

    def _watch_checker(self) -> None:
        if self._checker is not None and not self._checker.given_up:
            events = READ | WRITE if self._checker.blocked else READ
            self._loop.watch(self._checker.sock.fileno(), events, self._on_checker)

    def _watch_interpreter(self) -> None:
        child = self._interpreter
        if child is not None and not child.given_up:
            events = (0 if self._paused else READ) | (WRITE if child.blocked else 0)
            self._loop.watch(child.sock.fileno(), events, self._on_interpreter)

    def _forget(self, child: Child) -> None:
        self._loop.watch(child.sock.fileno(), 0, None)
        child.close()

    def _kill(self, child: Child) -> None:
        """Kills a child, and stops reading from it: messages left in its link may be forged."""
        child.given_up, child.retry_at = True, float("inf")
        self._loop.watch(child.sock.fileno(), 0, None)
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return  # dead already, and about to be reaped
