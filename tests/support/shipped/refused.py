"""Tools that can't be shipped, each with what stands in the way."""

from __future__ import annotations

import io
import socket
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from tests.support.shipped import helpers

ELSEWHERE = "it only means something in this process"


class Client:
    """A connection, as libraries have them."""

    def __init__(self) -> None:
        self.socket = socket.socket()
        self.socket.close()
        self.pending = {"main": [threading.Lock()]}


CLIENTS = {"main": Client()}
_SOCKET = CLIENTS["main"].socket
LOCK = threading.Lock()
STREAM = io.TextIOWrapper(io.BytesIO())
LETTERS = (letter for letter in "abc")
LOCAL = threading.local()


class Locked:
    limit = threading.Semaphore(2)

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __call__(self) -> None:
        with self.lock, self.limit:
            pass


def use_clients() -> Any:
    return CLIENTS["main"].socket


def use_several() -> Any:
    return LOCK, list(LETTERS), STREAM.read(), LOCAL


def use_undefined(x: int) -> Any:
    return _not_there(x) + _nor_this  # type: ignore[name-defined]  # noqa: F821


def use_file() -> str:
    return Path(__file__).read_text()


def use_whole_module() -> Any:
    return vars(helpers)


def use_own_import() -> Any:
    from tests.support.shipped import plain

    return plain.RATE


def use_relative_import() -> Any:
    from . import plain

    return plain.RATE


def _around() -> Any:
    lock = threading.Lock()

    def tool() -> bool:
        return lock.locked()

    return tool


use_closure = _around()


def _thread() -> Any:
    thread = threading.Thread(target=print)

    def use_thread(owner: Any = thread) -> Any:
        return owner

    return use_thread


use_default = _thread()


class Referring:
    def __init__(self) -> None:
        self.back = weakref.ref(helpers.clean)

    def __call__(self) -> Any:
        return self.back()


class Stubborn:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("not today")

    def __call__(self) -> None:
        return None


class Patched:
    """Has a method with no source."""

    def __call__(self, x: int) -> int:
        return self.answer(x)

    def answer(self, x: int) -> int:
        return x


Patched.answer = eval("lambda self, x: x * 2")  # type: ignore[method-assign]
patched = Patched()
without_source = eval("lambda x: x + rate", {"rate": 3})


def use_frame() -> Any:
    return FRAME.f_lineno


FRAME = sys._getframe()


def use_large() -> Any:
    return LARGE[0]


LARGE = bytearray(33 << 20)


class Plugin:
    made: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.made.append(cls.__name__)


class PluginTool(Plugin):
    def __call__(self) -> list[str]:
        return self.made


def _shared() -> Any:
    count = 0

    class Counting:
        def __call__(self) -> int:
            nonlocal count
            count += 1
            return count

    def use_shared(counting: Any = Counting()) -> tuple[int, int]:  # noqa: B008
        return counting(), count

    return use_shared


use_shared = _shared()


def _cant(kind: str) -> str:
    return f"a {kind} can't be shipped: it only means something in this process"


_NOT_HERE = "is not defined here; what exists in the sandbox only must be imported inside the tool"

REFUSED: dict[str, tuple[Any, list[str]]] = {
    "use_clients": (
        use_clients,
        [
            f"CLIENTS['main'].socket: {_cant('socket.socket')}",
            f"CLIENTS['main'].pending['main'][0]: {_cant('_thread.lock')}",
        ],
    ),
    "use_several": (
        use_several,
        [
            f"LETTERS: {_cant('generator')}",
            f"LOCAL: {_cant('_thread._local')}",
            f"LOCK: {_cant('_thread.lock')}",
            f"STREAM: {_cant('_io.TextIOWrapper')}",
        ],
    ),
    "use_undefined": (use_undefined, [f"_nor_this: {_NOT_HERE}", f"_not_there: {_NOT_HERE}"]),
    "use_file": (use_file, ["__file__: names a file of this machine, which the sandbox does not have"]),
    "use_whole_module": (
        use_whole_module,
        ["helpers: is a module of your own, of which only names can be shipped: name.attribute"],
    ),
    "use_own_import": (
        use_own_import,
        ["tests.support.shipped: is not in the sandbox and is imported inside the tool; import it at the top"],
    ),
    "use_relative_import": (
        use_relative_import,
        [".: is imported inside the tool, relative to its module; import it at the top"],
    ),
    "use_closure": (use_closure, [f"lock: {_cant('_thread.lock')}"]),
    "use_default": (use_default, [f"a default of self: {_cant('threading.Thread')}"]),
    "use_frame": (use_frame, [f"FRAME: {_cant('frame')}"]),
    "use_large": (use_large, ["its data has more than 33554432 bytes"]),
    "PluginTool": (PluginTool(), ["Plugin.__init_subclass__: would run again for PluginTool"]),
    "use_shared": (
        use_shared,
        ["count: is rebound (nonlocal) and shared with the class Counting; make it an attribute"],
    ),
    "Locked": (Locked(), [f"Locked.limit: {_cant('threading.Semaphore')}", f"self.lock: {_cant('_thread.RLock')}"]),
    "Referring": (Referring(), [f"self.back: {_cant('weakref.ReferenceType')}"]),
    "Stubborn": (
        Stubborn(),
        ["self: a tests.support.shipped.refused.Stubborn can't be shipped: RuntimeError: not today"],
    ),
    "bound": (_SOCKET.send, [f"self: {_cant('socket.socket')}"]),
    "module": (helpers, ["self: is a module of your own, of which only names can be shipped"]),
}
