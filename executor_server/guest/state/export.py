"""Writes the variables of an interpreter into a sealed memory file. index.py has the format and the reason for it.

Theory of operation. Pickling runs code of the program: each `__reduce__` and `__getstate__` may loop for ever, exit,
exhaust memory, or change the very variables that are being written. None of that may cost the session its
interpreter, so the interpreter forks and the copy pickles (writer.py). The copy has the variables by copy-on-write and
reports on a pipe which variable it begins with. The interpreter itself only watches. A variable that kills its copy, or
takes longer than VARIABLE_TIME_S, is left out, and a new copy begins from the start, at most _MAX_COPIES times.

Invariant: `export` changes nothing in the interpreter, and the file that it returns is whole (segments that add up, and
an index) or there is no file. The index has the reason for each missing variable.

The races:
- Only the forking thread exists in a copy. A lock that another thread of the program held at that moment stays locked
  for ever there, so a copy can hang without any fault of the variable that it is writing. The time per variable ends
  it.
- The interpreter reaps a copy itself and kills it only before that (`_end_copy`): a process id that is not reaped yet
  can't belong to another process.
- A process that the copy forked lives on with the pipe and the memory file. So a copy ends with its report _END and its
  exit status, never with the end of the pipe, and the file is sealed before its index is read: the manifest describes
  the sent bytes. Sealing fails while such a process has the file mapped for writing; then there is no export.
- A copy shares the file and its offset with the copy before, and a part may be written already. Each begins with an
  empty file.

The attack: the program may forge everything that a copy sends, its position on the pipe as well as the file. A position
counts only within the list of names, and an index is bounded before it is read. Both decide only about the program's
own variables, and the session that restores the state checks everything again.

A copy lives below the limits of the sandbox: half of the memory that is left, for its heap (RLIMIT_DATA) and for the
file, which a control group counts too. Without that bound the kernel would end the sandbox instead of the copy.
"""

from __future__ import annotations

import os
import resource
import select
import struct
import time
import warnings

from ..wire import link
from ..wire.lean import signal
from ..wire.proc import own_bytes
from .index import MAX_NAME_CHARS, MAX_NAMES_CHARS, MAX_VARIABLES, NotPickled, read_index
from .world import World
from .writer import Writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any, Callable, Optional

    Forking = Callable[[], AbstractContextManager[Any]]

# Seconds to write one variable; to write all of them; and for one copy, so that there is time for a second one.
VARIABLE_TIME_S = 5.0
EXPORT_TIME_S = 45.0
COPY_TIME_S = 20.0
# After this many copies that a variable ended, the rest of the variables is left out.
_MAX_COPIES = 12
# Bytes that a copy may take even when the sandbox has less left.
_MIN_COPY_BYTES = 8 * 1024 * 1024
# A report of a copy: the position of the variable that it begins with, or _END.
_POSITION = struct.Struct("!i")
_END = -1
# Seconds for a copy that has reported its end to exit, and between two checks of it.
_EXIT_TIME_S = 2.0
_EXIT_LOOK_S = 0.001


def export(
    world: World, max_bytes: int, forking: Forking, after_fork: Callable[[], None]
) -> tuple[int, dict[str, Any]]:
    """Returns a sealed memory file with the variables, which the caller closes, and the manifest.

    `forking` is entered while a copy is made; `after_fork` is called in the copy. Raises NotPickled when there is no
    memory or no process left for it.
    """
    names, omitted = _variable_names(world)
    copies = _Copies(world, names, omitted, max_bytes, forking, after_fork)
    fd = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        copies.run(fd)
        link.seal(fd)  # before the index is read: a process that a copy left behind can still write until then
        index = read_index(fd, os.fstat(fd).st_size)
    except OSError as error:
        os.close(fd)
        raise NotPickled(f"the variables can't be written: {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise
    written = [segment["name"] for segment in index["variables"]]
    return fd, {"variables": written, "omitted": index["omitted"], "cloudpickle": index["cloudpickle"]}


def _variable_names(world: World) -> tuple[list[str], dict[str, str]]:
    """Returns the variables that an index has room for, and the reason for each other one."""
    names: list[str] = []
    omitted: dict[str, str] = {}
    chars = 0
    for name in list(world.namespace):
        if type(name) is not str or (name[:2] == "__" and name[-2:] == "__"):
            continue
        if len(name) > MAX_NAME_CHARS or len(names) >= MAX_VARIABLES or chars + len(name) > MAX_NAMES_CHARS:
            omitted[name] = f"at most {MAX_VARIABLES} variables of short names can be written"
            continue
        try:
            name.encode()
        except UnicodeEncodeError:
            omitted[name] = "its name is no text that can be written"
            continue
        names.append(name)
        chars += len(name)
    return names, omitted


class _Copies:
    """Forks copies of this process that pickle, until one of them comes to the end."""

    def __init__(
        self,
        world: World,
        names: list[str],
        omitted: dict[str, str],
        max_bytes: int,
        forking: Forking,
        after_fork: Callable[[], None],
    ) -> None:
        self._world = world
        self._names = names
        self._omitted = omitted
        self._max_bytes = max_bytes
        self._forking = forking
        self._after_fork = after_fork
        self._deadline = time.monotonic() + EXPORT_TIME_S

    def run(self, fd: int) -> None:
        """Fills the file. Raises NotPickled when not even an empty list of variables can be written."""
        for _ in range(_MAX_COPIES):
            reached, why = self._copy(fd)
            if not why:
                return
            if reached is None or time.monotonic() >= self._deadline:
                break
            self._leave_out(self._names[reached], why)
        for name in self._names:
            self._leave_out(name, "other variables ended the writing process too often")
        self._names = []
        reached, why = self._copy(fd)
        if why:
            raise NotPickled(f"the variables can't be written: {why}")

    def _leave_out(self, name: str, why: str) -> None:
        self._omitted[name] = why
        self._names = [each for each in self._names if each != name]

    def _copy(self, fd: int) -> tuple[Optional[int], str]:
        """Runs one copy. Returns the position that it reached, and why it failed; empty if it finished."""
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            with self._forking(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # CPython warns of forks in a process with threads (module docstring)
                pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            raise NotPickled(f"no process is left to write the variables: {error.strerror}") from error
        if pid == 0:
            self._in_copy(fd, writer)
        os.close(writer)
        try:
            return self._watch(pid, reader)
        finally:
            os.close(reader)

    def _in_copy(self, fd: int, pipe: int) -> None:
        """Writes the variables and exits: a copy never returns into the interpreter's own code."""
        code = 1
        try:
            self._after_fork()
            _limit_copy(self._world)
            max_bytes = min(self._max_bytes, _copy_bytes(self._world))
            stop_at = min(time.monotonic() + COPY_TIME_S, self._deadline)

            def report(position: int) -> None:
                os.write(pipe, _POSITION.pack(position))

            Writer(self._world, fd, max_bytes, report).write(self._names, self._omitted, stop_at)
            report(_END)
            code = 0
        finally:
            os._exit(code)

    def _watch(self, pid: int, reader: int) -> tuple[Optional[int], str]:
        """Follows a copy until it is dead; kills it when its time is up."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        reached: Optional[int] = None
        why = ""
        deadline = time.monotonic() + VARIABLE_TIME_S
        while True:
            if not poll.poll(max(0.0, (deadline - time.monotonic()) * 1000)):
                why = f"writing it takes longer than {VARIABLE_TIME_S:g} s"
                break
            data = os.read(reader, 4096)
            if len(data) < _POSITION.size:
                break  # the copy is dead
            (reached,) = _POSITION.unpack(data[-_POSITION.size :])
            if reached == _END:
                break  # a process that the copy forked may hold the pipe open for ever
            deadline = time.monotonic() + VARIABLE_TIME_S
        status = _end_copy(pid, at_once=bool(why))
        if not why and not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and reached == _END):
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            why = f"the process that wrote it ended with {ended}"
        position = reached if reached is not None and 0 <= reached < len(self._names) else None
        return position, why


def _end_copy(pid: int, *, at_once: bool) -> int:
    """Reaps a copy, killed when it does not exit in time, and returns its wait status."""
    deadline = time.monotonic() + (0.0 if at_once else _EXIT_TIME_S)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the id is still the copy's
            return os.waitpid(pid, 0)[1]
        time.sleep(_EXIT_LOOK_S)


def _copy_bytes(world: World) -> int:
    """Returns the bytes that a copy may take: about half of what the sandbox has left."""
    return max((world.memory_bytes - own_bytes(b"RssAnon:")) // 2, _MIN_COPY_BYTES)


def _limit_copy(world: World) -> None:
    """Makes the copy run out of memory before the sandbox does, which would cost the interpreter."""
    bound = own_bytes(b"VmData:") + _copy_bytes(world)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    seconds = int(EXPORT_TIME_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
