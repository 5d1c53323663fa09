"""Reads the variables of another interpreter into this one. index.py has the format and the reason for it.

A state comes from the user's storage, so it may be forged. Unpickling runs in the sandbox, where a program could do the
same by itself, so a forger could only gain what the rules keep from programs. Hence `find_class` holds each name to the
rules (pickled_names.py), code is accepted only in segments that the index declares to hold code, from sessions under at
least these rules, and a state can change only functions and classes that it made itself (world.py).

A segment that fails leaves half-made objects in the memo, and a later segment must not get one. They are dropped, and
each later variable that refers to one of them fails with that reason.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import pickle
import pickletools
import struct
import sys
import time
import types
from functools import partial

from ..checks.failures import text_of
from ..checks.imports import CALLED_IMPORT
from ..checks.time_limit import TimeUp, within
from .index import MAX_REASON_CHARS, NotPickled, omitted_entries, read_index
from .pickled_names import check_name, check_value, is_ours_or_standard
from .world import Placeholder, World, sealed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Callable, Optional

# Seconds to read one variable, with the import of a large library that it needs; and to read all of them.
READ_TIME_S = 20.0
RESTORE_TIME_S = 45.0
# With fewer seconds left than this, no further variable is begun.
_MIN_TIME_S = 0.1
_NUMBER = struct.Struct("<i")


def restore(world: World, fd: int, size: int, guarded: Callable[..., Any]) -> dict[str, Any]:
    """Reads as many variables as possible into the namespace and returns the manifest. Closes the file.

    `guarded` calls a function with arguments and bounds the agent code that this runs. Raises NotPickled when the file
    is not a state.
    """
    with os.fdopen(fd, "rb", buffering=256 * 1024) as file:
        index = read_index(fd, size)
        reader = _Reader(world, file, index, guarded)
        return reader.read()


class _Reader:
    def __init__(self, world: World, file: BinaryIO, index: dict[str, Any], guarded: Callable[..., Any]) -> None:
        self._world = world
        self._file = file
        self._index = index
        self._guarded = guarded
        python = tuple(index["python"])
        self._same_code = python[:2] == sys.version_info[:2]
        self._written_by = "{}.{}".format(*python[:2])
        self._unpickler = _unpickler(world, file)
        self._deadline = time.monotonic() + RESTORE_TIME_S

    def read(self) -> dict[str, Any]:
        restored: list[str] = []
        omitted: dict[str, str] = {}
        end = 0
        for segment in self._index["variables"]:
            name, begin, end = segment["name"], end, end + segment["bytes"]
            why = self._why_not(segment)
            if not why:
                self._file.seek(begin)
                self._world.may_make_code = segment["code"]  # checked by `_why_not`
                try:
                    value = self._in_time(end)
                except BaseException as error:  # noqa: BLE001 (the border of agent code: unpickling runs what it wants)
                    why = _read_reason(error)
                else:
                    self._world.namespace[name] = value
                    restored.append(name)
            if why:
                omitted[name] = why
                self._forget_half(begin, end)
        return {"variables": restored, "omitted": omitted_entries(omitted)}

    def _why_not(self, segment: dict[str, Any]) -> str:
        name = segment["name"]
        if time.monotonic() >= self._deadline - _MIN_TIME_S:
            return "there was no time left for it"
        if name[:2] == "__" and name[-2:] == "__":
            return "no variable has such a name"
        if segment["code"] and not self._same_code:
            here = "{}.{}".format(*sys.version_info[:2])
            return f"it holds code compiled by Python {self._written_by}, and this is Python {here}"
        missing = self._world.enforcer.rules.refused.difference(self._index["refused"])
        if segment["code"] and missing:
            return f"its code was made where these rules did not hold: {', '.join(sorted(missing))}"
        return ""

    def _in_time(self, end: int) -> Any:
        value = within(min(READ_TIME_S, self._deadline - time.monotonic()), self._guarded, self._unpickler.load)
        if self._file.tell() != end:
            raise NotPickled("it has other bytes than the index says")
        if type(value) is Placeholder:
            raise NotPickled("it is code by itself, or the interpreter's own, and no variable")
        return value

    def _forget_half(self, begin: int, end: int) -> None:
        """Drops the possibly half-made objects of a failed segment from the memo.

        Its texts, classes and functions stay: each is complete, and later segments refer to them everywhere.
        """
        self._file.seek(begin)
        first, atoms = _numbers(self._file.read(end - begin))
        kept = {number: value for number, value in self._unpickler.memo.copy().items() if number < first}
        for number, (module, text) in atoms.items():
            try:
                kept[number] = text if module is None else self._unpickler.find_class(module, text)
            except BaseException:  # noqa: BLE001 (the border of agent code; a variable that refers to it fails)
                continue
        self._unpickler = _unpickler(self._world, self._file)
        self._unpickler.memo = _Memory(kept).memo


def _numbers(segment: bytes) -> tuple[int, dict[int, tuple[Optional[str], Any]]]:
    """Returns the first memo number of a segment, and by number its texts (None, text) and its (module, name) pairs."""
    first = 2**31
    atoms: dict[int, tuple[Optional[str], Any]] = {}
    last = ""
    value: Any = None
    try:
        for opcode, argument, _ in pickletools.genops(segment):
            if opcode.name in ("BINPUT", "LONG_BINPUT") and isinstance(argument, int):
                first = min(first, argument)
                if last == "BINUNICODE":
                    atoms[argument] = None, value
                elif last == "GLOBAL":
                    module, _, name = value.partition(" ")
                    atoms[argument] = module, name
            last, value = opcode.name, argument
    except ValueError:
        return 0, {}  # not a pickle: its numbers are not known, so nothing of the memo is kept
    return first, atoms


class _Memory(pickle.Unpickler):
    """An unpickler with a given memo; only an unpickler can give its memo to another one."""

    def __init__(self, kept: dict[int, Any]) -> None:
        self._kept = kept
        # For each: push its number, replace it by what `persistent_load` returns, put that into the memo, pop it.
        puts = b"".join(b"J%bQr%b0" % (_NUMBER.pack(each), _NUMBER.pack(each)) for each in kept)
        super().__init__(io.BytesIO(b"\x80\x03" + puts + b"N."))
        self.load()

    def persistent_load(self, number: Any) -> Any:
        return self._kept[number]


def _read_reason(error: BaseException) -> str:
    if isinstance(error, TimeUp):
        return f"reading it takes longer than {READ_TIME_S:g} s, or than was left of {RESTORE_TIME_S:g} s for all"
    if isinstance(error, NotPickled):
        return str(error)[:MAX_REASON_CHARS]
    text = text_of(error)
    if isinstance(error, pickle.UnpicklingError) and "Memo value not found" in text:
        return "it refers to a part of a variable that could not be read"
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARS]


def _unpickler(world: World, file: BinaryIO) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return world.resolve(name)

        def find_class(self, module: str, name: str) -> Any:
            rules = world.enforcer.rules
            if module in ("builtins", "__builtin__"):
                return _builtin(world, name)
            if module in _CLOUDPICKLE and name in _REPLACED:
                return sealed(_REPLACED[name](world, module, name))
            check_name(rules, module, name)
            value = super().find_class(module, name)
            home, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
            if home == "builtins" and isinstance(own, str) and own in vars(builtins):
                return _builtin(world, own)
            check_value(rules, module, name, value)
            if isinstance(home, str) and isinstance(own, str) and home != module and is_ours_or_standard(home):
                check_name(rules, home, own)
                check_value(rules, home, own, value)
            return world.hooks.given.get(id(value), (value, value))[1]

    return Unpickler(file)


_PLAIN_TYPES = frozenset(
    (
        *("bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range"),
        *("set", "slice", "str", "tuple"),
    )
)


def _builtin(world: World, name: str) -> Any:
    """Returns the program's builtin of this name. Raises NotPickled."""
    if name in _PLAIN_TYPES:
        return vars(builtins)[name]
    if name not in vars(builtins) or name not in world.names or (name[:2] == "__" and name != "__import__"):
        raise NotPickled(f"there is no builtin {name}")
    return world.names[CALLED_IMPORT if name == "__import__" else name]


# ---------------------------------------------------------------------------------------------------------------------
# Replacements for the functions of cloudpickle that make or change something: ours check what it is


def _of_cloudpickle(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _builtin_type(module: str, name: str, kind: Any) -> Any:
    found = _of_cloudpickle(module, name)(kind)
    if found in (types.CodeType, types.FunctionType):
        raise NotPickled(f"it holds the type {found.__name__}, by which a state could make code")
    return found


_CLOUDPICKLE = frozenset(("cloudpickle.cloudpickle", "cloudpickle.cloudpickle_fast"))
_REPLACED: dict[str, Callable[[World, str, str], Callable[..., Any]]] = {
    "_builtin_type": lambda world, module, name: partial(_builtin_type, module, name),
    "_class_setstate": lambda world, module, name: partial(world.settle_class, _of_cloudpickle(module, name)),
    "_function_setstate": lambda world, module, name: partial(
        world.settle_foreign_function, _of_cloudpickle(module, name)
    ),
    "_make_function": lambda world, module, name: world.make_foreign_function,
    "_make_skeleton_class": lambda world, module, name: partial(world.make_class, _of_cloudpickle(module, name)),
    "_make_skeleton_enum": lambda world, module, name: partial(world.make_class, _of_cloudpickle(module, name)),
    "subimport": lambda world, module, name: world.import_module,
}
