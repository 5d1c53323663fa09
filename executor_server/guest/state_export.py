"""Writes the variables of an interpreter down; state_index.py tells how, and what for."""

from __future__ import annotations

import os
import resource
import select
import struct
import sys
import time
import types
import warnings
from functools import partial

from . import link
from .failures import text_of
from .instrument import LastValue
from .lean import dumps, signal
from .state_index import (
    LENGTH,
    MAX_NAME_CHARS,
    MAX_NAMES_CHARS,
    MAX_OMITTED,
    MAX_REASON_CHARS,
    MAX_VARIABLES,
    PICKLE_PROTOCOL,
    NotPickled,
    read_index,
    said_of,
)
from .state_world import HOOKS, World, fill_cell, make_cell, make_code, module_named, reduced_function

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import Any, Callable, Iterator, Optional

# For one variable.
VARIABLE_TIME_S = 5.0
# For all of them, and for one copy: what a copy has no time for is left out, and there is time for a second one.
EXPORT_TIME_S = 45.0
COPY_TIME_S = 20.0
# That a variable may end; then what is left of them is left out.
_MAX_COPIES = 12
# That there is for it in any case.
_MIN_ROOM_BYTES = 8 * 1024 * 1024
# Of the index, besides names: what it says of one variable that is in it, and of all.
_ENTRY_BYTES = 64
_INDEX_BYTES = 2048
# For why variables are left out: at most one part of so many of the state, and so much.
_OMITTED_PART = 8
_MAX_OMITTED_BYTES = 384 * 1024
# What a copy says of where it is: the place of a variable, or that it has come to the end.
_PLACE = struct.Struct("!i")
_END = -1
_EXIT_TIME_S = 2.0
_LOOK_S = 0.001
_SPENT_ON_CHECKPOINTS = 10  # at most one part of so many of the time
_MAX_LOOKED_AT = 256
_MAX_PATH_PARTS = 8
_LOOKING_TIME_S = 1.0


def export(
    world: World, max_bytes: int, forking: Callable[[], AbstractContextManager[Any]], after_fork: Callable[[], None]
) -> tuple[int, dict[str, Any]]:
    """A sealed memory file with the variables, which is the caller's, and the manifest.

    `forking` is entered while a copy is made; `after_fork` is called in it. Raises NotPickled when there is no memory
    or no process left for it.
    """
    names, omitted = _variable_names(world)
    copies = _Copies(world, names, omitted, max_bytes, forking, after_fork)
    fd = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        copies.run(fd)
        index = read_index(fd, os.fstat(fd).st_size)
        link.seal(fd)
    except OSError as error:
        os.close(fd)
        raise NotPickled(f"the variables can't be written: {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise
    written = [segment["name"] for segment in index["variables"]]
    return fd, {"variables": written, "omitted": index["omitted"], "cloudpickle": index["cloudpickle"]}


def _variable_names(world: World) -> tuple[list[str], dict[str, str]]:
    names: list[str] = []
    omitted: dict[str, str] = {}
    chars = 0
    for name in list(world.namespace):
        if not isinstance(name, str) or (name[:2] == "__" and name[-2:] == "__"):
            continue
        chars += len(name)
        if len(name) > MAX_NAME_CHARS or len(names) >= MAX_VARIABLES or chars > MAX_NAMES_CHARS:
            omitted[name] = f"at most {MAX_VARIABLES} variables of short names can be written"
            continue
        try:
            name.encode()
        except UnicodeEncodeError:
            omitted[name] = "its name is no text that can be written"
            continue
        names.append(name)
    return names, omitted


class _Copies:
    """Has copies of this process pickle, until one of them comes to the end."""

    def __init__(
        self,
        world: World,
        names: list[str],
        omitted: dict[str, str],
        max_bytes: int,
        forking: Callable[[], AbstractContextManager[Any]],
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
        for _ in range(_MAX_COPIES):
            reached, why = self._copy(fd)
            if not why:
                return
            if reached is None or time.monotonic() >= self._deadline:
                break
            self._leave_out(self._names[reached], why)
        for name in self._names:
            self._leave_out(name, "others before it ended the process that wrote them, too often")
        self._names = []
        reached, why = self._copy(fd)
        if why:
            raise NotPickled(f"the variables can't be written: {why}")

    def _leave_out(self, name: str, why: str) -> None:
        self._omitted[name] = why
        self._names = [each for each in self._names if each != name]

    def _copy(self, fd: int) -> tuple[Optional[int], str]:
        """The place of the variable that it came to, and why it did not come to the end; empty when it did."""
        os.ftruncate(fd, 0)
        os.lseek(fd, 0, os.SEEK_SET)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            with self._forking(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a copy has no use for the program's threads
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

    def _in_copy(self, fd: int, writer: int) -> None:
        code = 1
        try:
            self._after_fork()
            _limit_copy(self._world)
            memory = max(_room(self._world) // 2, _MIN_ROOM_BYTES)
            stop_at = min(time.monotonic() + COPY_TIME_S, self._deadline)
            reach = partial(_reach, writer)
            _Writer(self._world, fd, min(self._max_bytes, memory), reach).write(self._names, self._omitted, stop_at)
            _reach(writer, _END)
            code = 0
        finally:
            os._exit(code)

    def _watch(self, pid: int, reader: int) -> tuple[Optional[int], str]:
        """Follows a copy until it is dead; kills it when its time is up."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        reached: Optional[int] = None
        why = ""
        turn = time.monotonic() + VARIABLE_TIME_S
        while True:
            if not poll.poll(max(0.0, (turn - time.monotonic()) * 1000)):
                why = f"writing it takes longer than {VARIABLE_TIME_S:g} s"
                break
            data = os.read(reader, 4096)
            if len(data) < _PLACE.size:
                break  # it is dead
            (reached,) = _PLACE.unpack(data[-_PLACE.size :])
            if reached == _END:
                break  # what it has forked may still hold the pipe
            turn = time.monotonic() + VARIABLE_TIME_S
        status = _end_of(pid, at_once=bool(why))
        if not why and not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and reached == _END):
            ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
            why = f"the process that wrote it ended with {ended}"
        place = reached if reached is not None and 0 <= reached < len(self._names) else None
        return place, why


def _reach(writer: int, place: int) -> None:
    os.write(writer, _PLACE.pack(place))


def _end_of(pid: int, *, at_once: bool) -> int:
    """The wait status of a copy that is about to end; killed when it does not."""
    deadline = time.monotonic() + (0.0 if at_once else _EXIT_TIME_S)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)  # not waited for yet, so there is one of this number
            return os.waitpid(pid, 0)[1]
        time.sleep(_LOOK_S)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(field.encode()):
                return int(line.split()[1]) * 1024
    return 0


def _room(world: World) -> int:
    """Bytes that the sandbox may still take, about."""
    return world.memory_bytes - _status_bytes("RssAnon:")


def _limit_copy(world: World) -> None:
    """The copy must run out of memory before the sandbox does, which would cost the interpreter."""
    bound = _status_bytes("VmData:") + max(_room(world) // 2, _MIN_ROOM_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (bound if hard == resource.RLIM_INFINITY else min(bound, hard), hard))
    seconds = int(EXPORT_TIME_S)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))


class _TooLarge(NotPickled):
    """The state is larger than it may be."""


class _Sink:
    """Bytes for a file, up to a limit."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._max_bytes = max_bytes
        self.position = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        if self.position + size > self._max_bytes:
            raise _TooLarge(f"the variables have more than {self._max_bytes} bytes with it")
        while view:
            view = view[os.write(self._fd, view) :]
        self.position += size
        return size

    def rewind(self, position: int) -> None:
        os.ftruncate(self._fd, position)
        os.lseek(self._fd, position, os.SEEK_SET)
        self.position = position


def _index_bytes(names: list[str], max_bytes: int) -> int:
    """What an index of these variables takes at most, with some of the reasons for what is left out."""
    omitted = min(max_bytes // _OMITTED_PART, _MAX_OMITTED_BYTES)
    return _INDEX_BYTES + len(dumps(names)) + _ENTRY_BYTES * len(names) + omitted


class _Nowhere:
    """Where bytes go that only have to be makeable."""

    def write(self, data: Any) -> int:
        return len(data)


class _Writer:
    """In the copy: writes segment after segment."""

    def __init__(self, world: World, fd: int, max_bytes: int, reach: Callable[[int], object]) -> None:
        """`max_bytes` is what the file may have, with its index."""
        self._world = world
        self._fd = fd
        self._max_bytes = max_bytes
        self._sink = _Sink(fd, max_bytes)
        self._reach = reach
        self._segments: list[dict[str, Any]] = []
        self._pickler: Any = None
        # Where it can go back to: how many segments, and the memo then.
        self._checkpoint: tuple[int, Any] = (0, None)
        self._checkpoint_cost_s = 0.0
        self._checkpoint_s = 0.0

    def write(self, names: list[str], omitted: dict[str, str], stop_at: float) -> None:
        try:
            make = pickler_type(self._world)
        except ImportError:
            for name in names:
                omitted[name] = "the image has no cloudpickle, which is needed to write variables"
            version, names = "", []
        else:
            import cloudpickle

            version = str(cloudpickle.__version__)[:64]
            self._make = make
            self._sink = _Sink(self._fd, self._max_bytes - _index_bytes(names, self._max_bytes))
            self._begin_again(None)
        for place, name in enumerate(names):
            self._reach(place)
            if time.monotonic() >= stop_at:
                omitted[name] = "there was no time left for it"
                continue
            try:
                self._write_one(name)
            except BaseException as error:  # noqa: BLE001 (the border of agent code: pickling runs what it wants)
                omitted[name] = self._reason(error, name)
                self._reach(place)
                self._go_back()
        tail = self._index(version, omitted)
        while tail:
            tail = tail[os.write(self._fd, tail) :]

    def _index(self, version: str, omitted: dict[str, str]) -> bytes:
        """The end of the file; names fewer of what is left out where there is no room for all."""
        named = MAX_OMITTED
        while True:
            index = {
                "python": list(sys.version_info[:3]),
                "cloudpickle": version,
                "refused": sorted(self._world.referee.rules.refused),
                "variables": self._segments,
                "omitted": said_of(omitted, named),
            }
            data = dumps(index)
            if not named or self._sink.position + len(data) + LENGTH.size <= self._max_bytes:
                return data + LENGTH.pack(len(data))
            named //= 2

    def _begin_again(self, memo: Any) -> None:
        self._pickler = self._make(self._sink)
        if memo is not None:
            self._pickler.memo = memo

    def _write_one(self, name: str) -> None:
        begin = self._sink.position
        self._pickler.has_code = False
        self._pickler.dump(self._world.namespace[name])
        size = self._sink.position - begin
        self._segments.append({"name": name, "bytes": size, "code": self._pickler.has_code})
        now = time.monotonic()
        if now - self._checkpoint_s >= self._checkpoint_cost_s * _SPENT_ON_CHECKPOINTS:
            self._checkpoint = (len(self._segments), self._pickler.memo.copy())
            self._checkpoint_s = time.monotonic()
            self._checkpoint_cost_s = self._checkpoint_s - now

    def _go_back(self) -> None:
        """What failed has left its traces in the memo: goes on from before them."""
        count, memo = self._checkpoint
        again = [segment["name"] for segment in self._segments[count:]]
        del self._segments[count:]
        self._sink.rewind(sum(segment["bytes"] for segment in self._segments))
        self._begin_again(memo)
        if memo is not None:
            self._checkpoint = (count, dict(memo))
        for name in again:
            self._write_one(name)

    def _reason(self, error: BaseException, name: str) -> str:
        if isinstance(error, NotPickled):
            return str(error)[:MAX_REASON_CHARS]
        try:
            where = self._where(self._world.namespace[name])
        except BaseException:  # noqa: BLE001 (it goes on running agent code)
            where = ""
        why = f"{type(error).__name__}: {text_of(error)}"[: MAX_REASON_CHARS - len(where)]
        return f"{why}{where}"

    def _where(self, value: Any) -> str:
        """Where in a container that is which can't be pickled."""
        path = ""
        left = _MAX_LOOKED_AT
        stop_at = time.monotonic() + _LOOKING_TIME_S
        for _ in range(_MAX_PATH_PARTS):
            for part, inner in _inside(value):
                left -= 1
                if left < 0 or time.monotonic() >= stop_at:
                    return f" (at {path})" if path else ""
                try:
                    self._make(_Nowhere()).dump(inner)
                except BaseException:  # noqa: BLE001 (that is what is looked for)
                    path, value = (path + part)[:80], inner
                    break
            else:
                break
        return f" (at {path})" if path else ""


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) is dict:
        for key, inner in value.items():
            yield f"[{key!r}]"[:40] if type(key) in (str, int) else "[…]", inner
    elif type(value) in (list, tuple):
        for place, inner in enumerate(value):
            yield f"[{place}]", inner
    elif type(value) in (set, frozenset):
        for inner in value:
            yield "{…}", inner
    elif type(getattr(value, "__dict__", None)) is dict and not isinstance(value, (type, types.FunctionType)):
        for name, inner in vars(value).items():
            yield f".{name}"[:40], inner


def pickler_type(world: World) -> Callable[[Any], Any]:
    """Makes picklers that write to what they are given. Raises ImportError where there is no cloudpickle."""
    from cloudpickle import CloudPickler

    standing = world.standing()
    namespace = world.namespace
    hooks = world.hooks

    class Pickler(CloudPickler):  # type: ignore[misc]  # which has no types
        has_code = False

        def __init__(self, file: Any) -> None:
            super().__init__(file, protocol=PICKLE_PROTOCOL)

        def persistent_id(self, obj: Any) -> Optional[str]:
            known = standing.get(id(obj))
            if known is not None:
                if not known[0]:
                    raise NotPickled("it is the interpreter's own: its namespace, or its builtins")
                return known[0]
            if type(obj) is types.MethodType:
                if obj.__self__ is hooks and obj.__name__ in HOOKS:
                    return f"hook:{obj.__name__}"
                if type(obj.__self__) is LastValue:
                    return "keep"
            return None

        def reducer_override(self, obj: Any) -> Any:
            kind = type(obj)
            if kind is types.FunctionType and obj.__globals__ is namespace:
                return reduced_function(obj)
            if kind is types.CodeType:
                self.has_code = True
                return make_code, self.dispatch_table[types.CodeType](obj)[1]
            if kind is types.CellType:
                try:
                    contents: tuple[Any, ...] = (obj.cell_contents,)
                except ValueError:
                    contents = ()
                return make_cell, (), contents, None, None, fill_cell
            if isinstance(obj, types.ModuleType):
                if sys.modules.get(obj.__name__) is not obj:
                    raise NotPickled("it is a module that can't be imported by its name")
                return module_named, (obj.__name__,)
            return super().reducer_override(obj)

    return Pickler
