"""Savepoints: copies of the interpreter, made by fork, that wait until the session goes back to them.

`take` forks a process that waits on a link of its own. RESUME makes it go on as the interpreter, at once.
MAKE_SUCCESSOR makes it fork another such process, a successor. The supervisor resumes one of the two and keeps the
other, so a session can go back any number of times.

Each fork is a double one. The process in between ends at once, so the copy becomes a child of process 1, the
supervisor: agent code that waits for its own children never meets it, and the supervisor learns of its exit. The copy
leads a kernel session of its own, which the supervisor spares when it kills everything else. The interpreter does not
wait for the second fork, which takes several times as long as the first: memory is copied by then. The copy itself
reports its pid. Before the interpreter does anything else, it waits for the process in between, and until the copy has
closed its descriptors of the program.

A copy has one thread, so a program with threads gets no savepoint: their locks would be held for ever. Some native
libraries can do without their threads (native_threads.py).

A copy shares open files with the program. If it kept a socket or a pipe, that would stay open after the program closed
its own: a port would stay taken, a reader would wait. So a copy puts /dev/null in their place, and reports it.

Agent code has the interpreter's memory, so it can kill its savepoints or forge the messages here. It gains nothing but
the loss of its own state.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time

from ..wire import link, native_threads
from ..wire.lean import dumps, socket
from ..wire.link_messages import Answered, CopyWaits, MakeSuccessor, Resume, Resumed, SavepointMade, message_of
from ..wire.savepoint_messages import MAX_LEFT_OUT, MAX_LEFT_OUT_CHARS
from .own_process import OOM_SCORE
from .workspace_copies import TooMany, WorkspaceCopies

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from ..wire.link_messages import LinkMessage, TakeSavepoint
    from .execution import Executions
    from .inbox import Inbox
    from .own_process import OwnProcess
    from .streams import Streams
    from .workspace_copies import Copy

    Answer = tuple[LinkMessage, bytes]

_OOM_SCORE_OF_COPIES = 1000
_OOM_SCORE_OF_BRANCHES = 950  # the session's interpreter outlives a branch that takes all memory
_MAX_NAMED = 3  # threads that a refusal names
# How often a copy checks whether its parent has ended, and seconds between two checks.
_ORPHAN_LOOKS, _ORPHAN_LOOK_S = 2000, 0.001


class Parts:
    """The parts of the interpreter that its copy has to change."""

    def __init__(
        self, sock: socket.socket, inbox: Inbox, executions: Executions, streams: Streams, process: OwnProcess
    ) -> None:
        self.sock = sock
        self.inbox = inbox
        self.executions = executions
        self.streams = streams
        self.process = process


class _Kept:
    """Everything that a copy needs to become what the interpreter was."""

    def __init__(self, files: Optional[Copy], random_state: Any) -> None:
        self.files = files
        self.random_state = random_state
        self.positions: Optional[Positions] = None
        self.switches = native_threads.switches()


def take(request: TakeSavepoint, packet: link.Packet, parts: Parts, copies: WorkspaceCopies) -> Answer:
    """Makes a savepoint. Returns the answer in the interpreter, and another one in the resumed copy."""
    if len(packet.fds) != 1:
        raise ValueError(f"a savepoint with {len(packet.fds)} descriptors")
    why_not = _why_not()
    if why_not:
        return _refusal(why_not)
    left_out = _left_out(parts)
    files: Optional[Copy] = None
    try:
        files = copies.save(request.file_bytes)
    except (TooMany, OSError) as error:
        reason = str(error) if isinstance(error, TooMany) else error.strerror or "they can't be read"
        if request.whole:
            return _refusal(reason)
        left_out.append(f"files of the workspace: {reason}")
    data = [entry.data for entry in (files or {}).values() if entry.is_whole]
    if files is not None and len(data) < len(files):
        count = len(files) - len(data)
        left_out.append(f"files of the workspace that can't be copied, and stay as they are: {count}")
    module = sys.modules.get("random")
    kept = _Kept(files, module.getstate() if module is not None else None)
    try:
        settled_read, settled_write = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        return _refusal(f"no descriptors are left for it: {error.strerror}")
    try:
        between = _fork()
    except OSError as error:
        os.close(settled_read)
        os.close(settled_write)
        return _refusal(f"no process could be made for it: {error.strerror}")
    if between == 0:
        os.close(settled_read)
        return _serve(packet.fds.pop(), parts, copies, kept, settled_write)
    os.close(settled_write)
    parts.process.between = between, settled_read
    packet.close_fds()
    lost = native_threads.lost(kept.switches, renewed=True)
    if lost:  # the supervisor closes the copy's link, and that ends it
        return _refusal(f"threads of native libraries run, and these can't do without them in a copy: {lost}")
    made = SavepointMade(
        files=len(data),
        file_bytes=sum(len(each) for each in data if isinstance(each, bytes)),
        left_out=[each[:MAX_LEFT_OUT_CHARS] for each in left_out[:MAX_LEFT_OUT]],
    )
    return Answered(ok=True), dumps(made.head())


def _refusal(why: str) -> Answer:
    return Answered(ok=False, message=why), b""


def _why_not() -> str:
    """Returns why the program can't be copied now; empty when it can."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        names = ", ".join(str(thread.name)[:40] for thread in others[:_MAX_NAMED])
        return f"{len(others)} threads of the program run ({names}), and a copy of the process would lack them"
    return ""


def _left_out(parts: Parts) -> list[str]:
    """Returns descriptions of what a copy will lack."""
    left_out = []
    children = _children()
    if children:
        left_out.append(f"child processes of the program: {children}")
    own = 2 + 2 * parts.executions.has_loop  # both links, and the pair by which an event loop wakes itself
    sockets = sum(stat.S_ISSOCK(status.st_mode) for _, status in _descriptors()) - own
    if sockets > 0:
        left_out.append(f"open sockets: {sockets}")
    return left_out


def _children() -> int:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return len(file.read().split())
    except FileNotFoundError:
        return 0  # this kernel does not list them


def _descriptors() -> list[tuple[int, os.stat_result]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.fstat(int(name))))
        except OSError:
            continue  # the listing's own
    return found


def _fork() -> int:
    """Forks a process that process 1 will adopt. Returns the pid of the one in between, and 0 in the copy.

    Raises OSError.
    """
    between = os.fork()
    if between:
        return between
    try:
        is_copy = os.fork() == 0
    except OSError:
        os._exit(1)  # the copy's link closes with this
    if not is_copy:
        os._exit(0)
    os.setsid()
    for _ in range(_ORPHAN_LOOKS):
        if os.getppid() == 1:
            return 0
        time.sleep(_ORPHAN_LOOK_S)
    os._exit(70)  # the program adopts orphans


class Positions:
    """The positions in this process's open files. A branch shares and moves them."""

    def __init__(self) -> None:
        self._all = [
            (fd, os.lseek(fd, 0, os.SEEK_CUR)) for fd, status in _descriptors() if stat.S_ISREG(status.st_mode)
        ]

    def restore(self) -> int:
        """Returns how many could not be restored."""
        failed = 0
        for fd, position in self._all:
            try:
                os.lseek(fd, position, os.SEEK_SET)
            except OSError:
                failed += 1
        return failed


# ---------------------------------------------------------------------------------------------------------------------
# In the copy


def _serve(theirs: int, parts: Parts, copies: WorkspaceCopies, kept: _Kept, settled: int) -> Answer:
    """Waits for RESUME and then returns; makes successors meanwhile. Ends with the link.

    Closes `settled` once it has closed the program's descriptors.
    """
    try:
        _settle(theirs, parts, kept)
        os.close(settled)  # the program's pipes are closed by now, and with them this one
        if kept.switches:
            native_threads.renew()
        waiting = socket.socket(fileno=theirs)
        link.send(waiting, CopyWaits(pid=os.getpid()))
        while True:
            packet = link.receive(waiting, link.INLINE_BYTES)
            message = message_of(packet)
            if isinstance(message, Resume):
                return _go_on(waiting, parts, copies, kept, is_branch=message.branch)
            if not isinstance(message, MakeSuccessor) or len(packet.fds) != 1:
                raise ValueError("a message that is not for a savepoint")
            if not _made_successor():
                waiting.close()
                waiting = socket.socket(fileno=packet.fds.pop())
                link.send(waiting, CopyWaits(pid=os.getpid()))
            packet.close_fds()
    except link.LinkClosed:
        os._exit(0)
    except BaseException:  # noqa: BLE001 - the supervisor sees its end
        os._exit(70)


def _made_successor() -> bool:
    """Forks a successor, and returns false in it. If the fork fails, its link closes, which is the answer."""
    try:
        between = _fork()
        if between:
            os.waitpid(between, 0)
    except OSError:
        return True  # or the program lets the kernel wait for its children
    return between > 0


def _settle(theirs: int, parts: Parts, kept: _Kept) -> None:
    _set_oom_score(_OOM_SCORE_OF_COPIES)
    kept.positions = Positions()
    for fd, status in _descriptors():
        if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFCHR) and fd != theirs:
            os.dup2(parts.streams.null, fd, inheritable=fd <= 2)


def _go_on(waiting: socket.socket, parts: Parts, copies: WorkspaceCopies, kept: _Kept, *, is_branch: bool) -> Answer:
    """Makes this process the interpreter. Returns its first message."""
    _set_oom_score(_OOM_SCORE_OF_BRANCHES if is_branch else OOM_SCORE)
    os.dup2(waiting.fileno(), parts.sock.fileno(), inheritable=False)
    waiting.close()
    parts.process.move_here()
    parts.inbox.forget()
    parts.executions.forget_loop()
    parts.streams.forget_idle()
    if kept.random_state is not None:  # a fork gives the copy another one
        sys.modules["random"].setstate(kept.random_state)
    left_out = []
    if kept.positions is not None and (failed := kept.positions.restore()):
        left_out.append(f"positions in open files: {failed}")
    if kept.files is not None and not is_branch:
        failed = copies.restore(kept.files)
        if failed:
            left_out.append(f"files of the workspace that could not be restored: {failed}")
    return Resumed(left_out=left_out[:MAX_LEFT_OUT]), b""


def _set_oom_score(score: int) -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(score))
