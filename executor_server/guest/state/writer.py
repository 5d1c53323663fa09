"""Pickles variables into segments and an index: the part of an export that runs in the copy of the interpreter.

One pickler writes all variables, so that shared objects are written once. A failed variable leaves memo entries that
refer to missing bytes, and a later variable would refer to them in turn. So after a failure the file and the memo go
back to a checkpoint, and the variables since then are written again. Copying the memo costs time that grows with the
state, so checkpoints take at most a _CHECKPOINT_SHARE-th of the time.

Invariant: each memo entry of the pickler refers to bytes of a segment that is in the index.
"""

from __future__ import annotations

import os
import sys
import time
import types

from ..checks.failures import text_of
from ..checks.sentinels import HOOKS, LastValue
from ..wire.lean import dumps
from .index import LENGTH, MAX_OMITTED, MAX_REASON_CHARS, PICKLE_PROTOCOL, NotPickled, omitted_entries
from .world import World, fill_cell, make_cell, make_code, module_named, reduced_function

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Optional

# Bytes that the index takes besides names: for each variable that is in it, and for all that is not a list.
_ENTRY_BYTES = 64
_INDEX_BYTES = 2048
# Room for the reasons why variables are left out: a share of the state, and its maximum in bytes.
_OMITTED_SHARE = 8
_MAX_OMITTED_BYTES = 384 * 1024
# Checkpoints take at most this share of the time: one part in ten.
_CHECKPOINT_SHARE = 10
# Limits of the search for the part of a value that can't be pickled: parts tried, depth of the path, seconds.
_MAX_PARTS_TRIED = 256
_MAX_PATH_PARTS = 8
_SEARCH_TIME_S = 1.0


class _TooLarge(NotPickled):
    """The state is larger than it may be."""


class _Sink:
    """Writes bytes to a file, up to a limit."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._max_bytes = max_bytes
        self.position = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        size = len(view)
        if self.position + size > self._max_bytes:
            raise _TooLarge(f"the variables have more than {self._max_bytes} bytes with it")
        _write_all(self._fd, view)
        self.position += size
        return size

    def rewind(self, position: int) -> None:
        os.ftruncate(self._fd, position)
        os.lseek(self._fd, position, os.SEEK_SET)
        self.position = position


def _write_all(fd: int, data: Any) -> None:
    while data:
        data = data[os.write(fd, data) :]


class _Nowhere:
    """A file that keeps nothing, for a trial pickle."""

    def write(self, data: Any) -> int:
        return len(data)


def _index_bytes(names: list[str], max_bytes: int) -> int:
    """Bytes that an index of these variables takes at most, with some of the reasons for those left out."""
    omitted = min(max_bytes // _OMITTED_SHARE, _MAX_OMITTED_BYTES)
    return _INDEX_BYTES + len(dumps(names)) + _ENTRY_BYTES * len(names) + omitted


class Writer:
    """Writes segment after segment, then the index."""

    def __init__(self, world: World, fd: int, max_bytes: int, report: Callable[[int], object]) -> None:
        """`max_bytes` bounds the file with its index; `report` is called with the position of each variable."""
        self._world = world
        self._fd = fd
        self._max_bytes = max_bytes
        self._sink = _Sink(fd, max_bytes)
        self._report = report
        self._segments: list[dict[str, Any]] = []
        self._pickler: Any = None
        self._checkpoint: tuple[int, Any] = (0, None)  # the number of segments, and the memo then
        self._checkpoint_cost_s = 0.0
        self._checkpoint_s = 0.0

    def write(self, names: list[str], omitted: dict[str, str], stop_at: float) -> None:
        """Writes these variables until `stop_at`; adds the reason for each failure to `omitted`."""
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
            self._restart(None)
        for position, name in enumerate(names):
            self._report(position)
            if time.monotonic() >= stop_at:
                omitted[name] = "there was no time left for it"
                continue
            try:
                self._write_one(name)
            except BaseException as error:  # noqa: BLE001 (the border of agent code: pickling runs what it wants)
                omitted[name] = self._reason(error, name)
                self._report(position)
                self._go_back()
        _write_all(self._fd, self._index(version, omitted))

    def _index(self, version: str, omitted: dict[str, str]) -> bytes:
        """Returns the end of the file. Without room for all omitted variables, it names fewer."""
        named = MAX_OMITTED
        while True:
            index = {
                "python": list(sys.version_info[:3]),
                "cloudpickle": version,
                "refused": sorted(self._world.enforcer.rules.refused),
                "variables": self._segments,
                "omitted": omitted_entries(omitted, named),
            }
            data = dumps(index)
            if not named or self._sink.position + len(data) + LENGTH.size <= self._max_bytes:
                return data + LENGTH.pack(len(data))
            named //= 2

    def _restart(self, memo: Any) -> None:
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
        if now - self._checkpoint_s >= self._checkpoint_cost_s * _CHECKPOINT_SHARE:
            self._checkpoint = (len(self._segments), self._pickler.memo.copy())
            self._checkpoint_s = time.monotonic()
            self._checkpoint_cost_s = self._checkpoint_s - now

    def _go_back(self) -> None:
        """Returns to the checkpoint after a failure, and rewrites the variables since then."""
        count, memo = self._checkpoint
        again = [segment["name"] for segment in self._segments[count:]]
        del self._segments[count:]
        self._sink.rewind(sum(segment["bytes"] for segment in self._segments))
        self._restart(memo)
        if memo is not None:
            self._checkpoint = (count, dict(memo))  # the pickler adds to its own
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
        """Returns the path to the part of a container that can't be pickled, as " (at …)"; empty when none is found."""
        path = ""
        left = _MAX_PARTS_TRIED
        stop_at = time.monotonic() + _SEARCH_TIME_S
        for _ in range(_MAX_PATH_PARTS):
            for part, inner in _inside(value):
                left -= 1
                if left < 0 or time.monotonic() >= stop_at:
                    return f" (at {path})" if path else ""
                try:
                    self._make(_Nowhere()).dump(inner)
                except BaseException:  # noqa: BLE001 (the failure that is searched for)
                    path, value = (path + part)[:80], inner
                    break
            else:
                break
        return f" (at {path})" if path else ""


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of a container or an object, each with its piece of the path."""
    if type(value) is dict:
        for key, inner in value.items():
            yield f"[{key!r}]"[:40] if type(key) in (str, int) else "[…]", inner
    elif type(value) in (list, tuple):
        for position, inner in enumerate(value):
            yield f"[{position}]", inner
    elif type(value) in (set, frozenset):
        for inner in value:
            yield "{…}", inner
    elif type(getattr(value, "__dict__", None)) is dict and not isinstance(value, (type, types.FunctionType)):
        for name, inner in vars(value).items():
            yield f".{name}"[:40], inner


def pickler_type(world: World) -> Callable[[Any], Any]:
    """Returns a class of picklers that refer to the interpreter's own objects by name; its argument is a file.

    Raises ImportError where there is no cloudpickle.
    """
    from cloudpickle import CloudPickler

    named = world.named_objects()
    namespace = world.namespace
    hooks = world.hooks

    class Pickler(CloudPickler):  # type: ignore[misc]  # which has no types
        has_code = False

        def __init__(self, file: Any) -> None:
            super().__init__(file, protocol=PICKLE_PROTOCOL)

        def persistent_id(self, obj: Any) -> Optional[str]:
            known = named.get(id(obj))
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
