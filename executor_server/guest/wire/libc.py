"""Functions of the C library, without ctypes.

A sandbox needs two of them, and ctypes around its C core would cost every one of its processes memory, and its start
6 ms. The core calls a function with integers and None, as the C types int and pointer, and returns an int.
"""

from __future__ import annotations

import _ctypes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

PR_SET_DUMPABLE = 4


def function(name: str) -> Callable[..., int]:
    """A function of the C library. Raises OSError when there is none of this name."""
    address = _ctypes.dlsym(_ctypes.dlopen(None, 0), name)  # type: ignore[arg-type]  # None: the process itself
    call: Callable[[int, tuple[Optional[int], ...]], int] = _ctypes.call_cdeclfunction

    def called(*arguments: Optional[int]) -> int:
        return call(address, arguments)

    return called
