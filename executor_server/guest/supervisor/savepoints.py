"""Keeps the savepoints of a session: processes that wait, copies of the interpreter (interpreter/savepoint.py).

The process of a savepoint becomes the interpreter when the session goes back to it. Then the same savepoint is taken
again, before anything else uses the interpreter, and after the client has its answer.

A savepoint costs what has changed since it was taken. Its memory counts against the sandbox's limit, so the oldest are
dropped when there are more than the policy allows, or when memory is short.

Trust. The pid of a copy comes from the interpreter, so it is agent code's: it is taken only for a process of this
sandbox that is no one else's, a child of process 1 that leads a session of its own. A program can put any process of
its own in that place; then it goes back to that, and has gained nothing.
"""

from __future__ import annotations

import os
import select
import time

from executor_api.limits import SAVEPOINTS_MAX

from ..wire import link
from ..wire.frames import FrameError
from ..wire.lean import dumps, signal
from ..wire.link_messages import Answered, Resume, Resumed, SavepointMade, TakeSavepoint, message_of
from ..wire.savepoint_messages import MAX_LEFT_OUT, ListedSavepoint, RollBack, SavepointList
from ..wire.schema import read_object
from . import memory
from .children import Child

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..wire.channel import Channel
    from ..wire.lean import socket
    from .child_processes import ChildProcesses
    from .config import Config
    from .requests import Requests
    from .results import Results

    OnTaken = Callable[[Optional[int], str], None]

# Seconds for a copy to go on, with all files of the workspace written back; a few milliseconds are usual.
_RESUME_TIME_S = 5.0
# The part of the sandbox's memory above which the oldest savepoints are dropped.
_MEMORY_PART = 0.7
_STAT_PPID, _STAT_SESSION = 1, 3


class _Savepoint:
    def __init__(self, pid: int, sock: socket.socket, entry: ListedSavepoint) -> None:
        self.number = entry.savepoint
        self.pid = pid
        self.sock = sock
        self.entry = entry


class Savepoints:
    """Owns them, the oldest first."""

    def __init__(
        self,
        config: Config,
        channel: Channel,
        results: Results,
        children: ChildProcesses,
        requests: Requests,
        go_back: Callable[[int], bool],
    ) -> None:
        """`go_back` replaces the interpreter, calls `resume` for the new one, and returns what that returned."""
        self._config = config
        self._channel = channel
        self._children = children
        self._requests = requests
        self._results = results
        self._go_back = go_back
        self._kept: list[_Savepoint] = []
        self._count = 0
        self._dropped = 0  # since the last answer
        self._gone_on: Optional[ListedSavepoint] = None  # the interpreter is its process, and is to take it again
        self._file_bytes = 0  # a savepoint may hold of the workspace
        self._left_out: list[str] = []  # by the last resumption

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(savepoint.pid for savepoint in self._kept)

    @property
    def sharing(self) -> frozenset[int]:
        """The processes that share memory: theirs, and the interpreter's."""
        return self.pids | {self._children.interpreter.pid} if self._kept else frozenset()

    def close_all(self) -> None:
        for savepoint in self._kept:
            savepoint.sock.close()

    def note_exit(self, pid: int) -> bool:
        """Drops the savepoint whose process has ended."""
        for savepoint in self._kept:
            if savepoint.pid == pid:
                self._forget(savepoint)
                return True
        return False

    # -- taking --------------------------------------------------------------------------------------------------

    def take(self, kept: int, file_bytes: int, *, op: int = 0, on_taken: Optional[OnTaken] = None) -> None:
        """Has the interpreter make one; answers the request, or calls `on_taken` with its number, or the reason."""
        self._file_bytes = file_bytes

        number = self._count + 1

        def on_made(why_not: str) -> None:
            if not why_not:
                self._count = number
                self._drop_beyond(min(kept, SAVEPOINTS_MAX))
                if self._find(number) is None:
                    why_not = "the memory of the sandbox does not suffice"
            if on_taken is not None:
                on_taken(None if why_not else number, why_not)
            elif why_not:
                self._channel.fail(op, "savepoint_refused", f"no savepoint could be taken: {why_not}")
            else:
                self.answer(op, taken=number)

        self._make(number, time.time(), on_made)

    @property
    def is_due(self) -> bool:
        """True when the interpreter has gone on from a savepoint, which is to be taken again."""
        return self._gone_on is not None

    def take_again(self) -> None:
        """Takes the savepoint again that the interpreter has gone on from, before anything else uses it."""
        entry, self._gone_on = self._gone_on, None
        assert entry is not None

        def on_made(why_not: str) -> None:
            self._dropped += bool(why_not)

        self._make(entry.savepoint, entry.made, on_made)

    def _make(self, number: int, made_s: float, on_made: Callable[[str], None]) -> None:
        """`on_made` gets the reason when there is none; else nothing."""
        ours, theirs = link.make_pair()
        ours.setblocking(False)

        def on_answer(answer: Answered, body: bytes) -> None:
            if not answer.ok:
                ours.close()
                on_made(answer.message or "no reason was given")
                return
            made = read_object(SavepointMade, body, "a savepoint")
            self._check(made.pid)
            entry = ListedSavepoint(
                savepoint=number,
                made=made_s,
                files=made.files,
                file_bytes=made.file_bytes,
                left_out=made.left_out,
            )
            self._kept.append(_Savepoint(made.pid, ours, entry))
            on_made("")

        self._requests.ask(TakeSavepoint(file_bytes=self._file_bytes), (theirs.detach(),), on_answer)

    def _check(self, pid: int) -> None:
        """Raises FrameError unless the process may be a copy of the interpreter."""
        try:
            with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                text = file.read()
        except OSError as error:
            raise FrameError(f"process {pid} is not there") from error
        stat = text[text.rfind(b")") + 2 :].split()
        if pid in self.sharing or int(stat[_STAT_PPID]) != 1 or int(stat[_STAT_SESSION]) != pid:
            raise FrameError(f"process {pid} is no copy of the interpreter")

    def _drop_beyond(self, most: int) -> None:
        while len(self._kept) > most:
            self._drop(self._kept[0])
        while self._kept and self._memory_is_short():
            self._drop(self._kept[0])

    def _memory_is_short(self) -> bool:
        limit_bytes = int(self._config.memory_bytes * _MEMORY_PART)
        # Without their shares first, as if nothing were shared: that is fast, and mostly enough to know.
        return memory.sandbox_memory_bytes() > limit_bytes and memory.sandbox_memory_bytes(self.sharing) > limit_bytes

    # -- going back ----------------------------------------------------------------------------------------------

    def roll_back(self, request: RollBack) -> None:
        """Goes back, and answers the request."""
        if self._find(request.savepoint) is None:
            numbers = ", ".join(str(savepoint.number) for savepoint in self._kept) or "none"
            message = f"savepoint {request.savepoint} is not there; those that are: {numbers}"
            self._channel.fail(request.op, "savepoint_not_found", message)
        elif self._go_back(request.savepoint):
            for savepoint in [each for each in self._kept if each.number > request.savepoint]:
                self._drop(savepoint)
            self.answer(request.op)
        else:
            message = f"savepoint {request.savepoint} did not answer: a new interpreter was started, without variables"
            self._channel.fail(request.op, "savepoint_lost", message)

    def resume(self, number: int) -> bool:
        """Makes the process of this savepoint the interpreter; false when that failed.

        Waits for it, at most `_RESUME_TIME_S`, since nothing else can be done without an interpreter.
        """
        savepoint = self._find(number)
        if savepoint is None:
            return False
        ours, theirs = link.make_pair()
        self._left_out = []
        try:
            link.send(savepoint.sock, Resume(), fds=(theirs.fileno(),))
            theirs.close()  # so that the end of the copy is an end of the link
            waiting = select.poll()
            waiting.register(ours, select.POLLIN)  # ready also when the copy has ended, and with it the other end
            if not waiting.poll(_RESUME_TIME_S * 1000):
                raise FrameError("no answer")
            packet = link.receive(ours, link.INLINE_BYTES)
            packet.close()
            message = message_of(packet)
            if not isinstance(message, Resumed):
                raise FrameError(f"a message {message.kind!r} of a savepoint")
            if message.pid != savepoint.pid:
                raise FrameError(f"process {message.pid} in place of {savepoint.pid}")
        except (OSError, link.LinkClosed, FrameError):
            ours.close()
            theirs.close()
            self._drop(savepoint)
            return False
        ours.setblocking(False)
        self._left_out = message.left_out
        self._kept.remove(savepoint)
        savepoint.sock.close()
        self._gone_on = savepoint.entry
        self._children.adopt(Child(savepoint.pid, ours))
        return True

    # -- answering -------------------------------------------------------------------------------------------------

    def answer(self, op: int, taken: Optional[int] = None) -> None:
        """Answers a request with all savepoints that are there."""
        answer = SavepointList(
            savepoints=[*(savepoint.entry for savepoint in self._kept), *([self._gone_on] if self._gone_on else ())],
            dropped=self._dropped,
            generation=self._results.generation,
            taken=taken,
            left_out=self._left_out[:MAX_LEFT_OUT],
        )
        self._dropped, self._left_out = 0, []
        self._channel.done(op, dumps(answer.head()))

    def _find(self, number: int) -> Optional[_Savepoint]:
        return next((savepoint for savepoint in self._kept if savepoint.number == number), None)

    def _drop(self, savepoint: _Savepoint) -> None:
        self._forget(savepoint)
        try:
            os.kill(savepoint.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended, and its exit is about to be reaped

    def _forget(self, savepoint: _Savepoint) -> None:
        self._kept.remove(savepoint)
        self._dropped += 1
        savepoint.sock.close()
