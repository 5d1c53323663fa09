"""Functions of the C library, without ctypes.

A sandbox needs a few of them. Importing all of ctypes would cost each of its processes memory, and its start 6 ms. The
C core of ctypes calls a function with integers and None, as C's int and pointer, and returns an int.
"""

from __future__ import annotations

import _ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Union

PR_SET_DUMPABLE = 4


def function(name: str) -> Callable[..., int]:
    """Returns a function of the C library. Raises OSError if it does not exist."""
    address = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]  # None: the process itself
    call: Callable[[int, tuple[Optional[int], ...]], int] = _ctypes.call_cdeclfunction

    def called(*arguments: Optional[int]) -> int:
        return call(address, arguments)

    return called


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]  # as ctypes.c_int
    _type_ = "i"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


def checked_function(name: str) -> Callable[..., int]:
    """Returns a function of the C library that takes integers and bytes, and raises OSError if it returns -1."""
    call = _Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), name))  # type: ignore[arg-type]

    def called(*arguments: Union[int, bytes]) -> int:
        result: int = call(*arguments)
        if result == -1:
            number = _ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    return called
