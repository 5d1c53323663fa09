"""Finds what a program changed, in the branch in which it ran: a copy of the interpreter (savepoint.py).

A variable has changed when its name is bound to another value, or when its value has another digest. Both digests are
made in the same process. So values without readable content (functions, classes, generators, C objects without
attributes) are compared by identity. Values that are too large, or take too long, are reported as unknown.

The code of values (`__repr__`, properties) may run here, in the branch and not in the session.
"""

from __future__ import annotations

import time
import types

from executor_api.values import ValueLimits, digest

from ..checks.control import ControlException
from ..checks.time_limit import within
from ..wire.lean import dumps
from ..wire.link_messages import Answered, BeginBranch, BranchChanges, EndBranch
from ..wire.messages import MAX_NAME_CHARS
from ..wire.savepoint_messages import Changes
from .savepoint import Positions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from ..wire.link_messages import LinkMessage
    from .workspace_copies import WorkspaceCopies

# Seconds to digest all values, once before the program and once after it. Values not digested by then are unknown.
_LOOK_TIME_S = 2.0
# Bytes of one value that are read.
_LOOK_BYTES = 1024**3
# Nested objects that are followed.
_MAX_DEPTH = 60
_LIMITS = ValueLimits(total_bytes=_LOOK_BYTES, unfolded_bytes=_LOOK_BYTES)
# Values of these types do not change.
_FIXED = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range)
# Values of these types are compared by identity.
_OPAQUE = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType),
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
)
_BASES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (dict, lambda value: list(dict.items(value))),
    (list, lambda value: list(list.__iter__(value))),
    (tuple, lambda value: list(tuple.__iter__(value))),
    (set, lambda value: list(set.__iter__(value))),
    (frozenset, lambda value: list(frozenset.__iter__(value))),
    (str, str.__str__),
    ((bytes, bytearray), bytes),
)


class _TooMuch(Exception):
    """A value is too large or too deep to be digested."""


class _Look:
    """Digests one value."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        self._depth = 0

    def digest(self, value: object) -> bytes:
        """Raises _TooMuch, TimeUp, EncodeError, and exceptions of the value's own code that the codec lets through."""
        return digest(value, _LIMITS, self._unlike, passing=(ControlException, _TooMuch))

    def _unlike(self, value: object) -> bytes:
        """Returns the digest of a value without an exact form in the codec."""
        identity = b"%d" % id(value)
        kind = type(value)  # not isinstance, which asks the value itself
        if issubclass(kind, _OPAQUE) or id(value) in self._seen:
            return identity
        if kind in (list, tuple, dict, set, frozenset):
            raise _TooMuch  # beyond the limits of the codec
        content = [read(value) for base, read in _BASES if issubclass(kind, base)]
        attributes = _attributes(value)
        if not content and not attributes:
            return identity
        if self._depth >= _MAX_DEPTH:
            raise _TooMuch
        self._seen[id(value)] = value
        self._depth += 1
        try:
            return b"%d " % id(kind) + self.digest([content, attributes])
        finally:
            self._depth -= 1


def _attributes(value: object) -> dict[str, object]:
    """Returns the attributes of an instance without running its code."""
    found: dict[str, object] = {}
    for cls in type.__dict__["__mro__"].__get__(type(value)):
        for name, member in type.__dict__["__dict__"].__get__(cls).items():
            try:
                if isinstance(member, types.MemberDescriptorType):
                    found[name] = member.__get__(value)
                elif name == "__dict__" and isinstance(member, types.GetSetDescriptorType):
                    found.update(member.__get__(value))
            except AttributeError:
                continue  # an empty slot
    return found


class Branch:
    """Answers the supervisor: in the branch before and after its program, and in the interpreter after the branch."""

    def __init__(self, namespace: dict[str, Any], guarded: Callable[..., Any], copies: WorkspaceCopies) -> None:
        self._look = _Variables(namespace, guarded)
        self._copies = copies
        self._positions = Positions()

    def answer(self, message: LinkMessage) -> tuple[LinkMessage, bytes]:
        if isinstance(message, BeginBranch):
            self._look.begin()
            return Answered(ok=True), b""
        if isinstance(message, EndBranch):
            files = Changes.of(*self._copies.changes())
            return Answered(ok=True), dumps(BranchChanges(variables=self._look.changes(), files=files).head())
        failed = {
            "files of the workspace that could not be restored": self._copies.restore_last(),
            "positions in open files": self._positions.restore(),
        }
        why = "; ".join(f"{what}: {count}" for what, count in failed.items() if count)
        return Answered(ok=not why, message=why), b""


class _Variables:
    """Notes the variables before a program, and finds the changed ones after it."""

    def __init__(self, namespace: dict[str, Any], guarded: Callable[..., Any]) -> None:
        self._namespace = namespace
        self._guarded = guarded
        self._before: dict[str, Any] = {}
        self._digests: dict[str, Optional[bytes]] = {}

    def begin(self) -> None:
        self._before = _listed(self._namespace)
        ends_s = time.monotonic() + _LOOK_TIME_S
        for name, value in self._before.items():
            if type(value) not in _FIXED:
                self._digests[name] = self._digest(value, ends_s)

    def changes(self) -> Changes:
        now, before = _listed(self._namespace), self._before
        ends_s = time.monotonic() + _LOOK_TIME_S
        changed, unknown = [], []
        for name, value in now.items():
            if name not in before:
                continue
            is_same = self._is_same(name, value, ends_s)
            if is_same is None and value is before[name]:
                unknown.append(name)
            elif not is_same:
                changed.append(name)
        return Changes.of(now.keys() - before.keys(), changed, before.keys() - now.keys(), unknown)

    def _is_same(self, name: str, value: Any, ends_s: float) -> Optional[bool]:
        """Returns None when it is unknown."""
        old = self._before[name]
        if type(old) in _FIXED:
            if value is old:
                return True
            if type(value) is not type(old):
                return False
            was: Optional[bytes] = self._digest(old, ends_s)
        else:
            was = self._digests[name]
        is_now = self._digest(value, ends_s)
        return None if was is None or is_now is None else was == is_now

    def _digest(self, value: Any, ends_s: float) -> Optional[bytes]:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            return None
        try:
            return within(left_s, self._guarded, _Look().digest, value)  # type: ignore[no-any-return]
        except BaseException:  # noqa: BLE001 (the border of agent code: unreadable values are unknown)
            return None


def _listed(namespace: dict[str, Any]) -> dict[str, Any]:
    """Returns the variables by name. Names with a leading underscore are private, as in notebooks."""
    return {
        name: value
        for name, value in list(namespace.items())
        if type(name) is str and name[:1] != "_" and len(name) <= MAX_NAME_CHARS
    }
