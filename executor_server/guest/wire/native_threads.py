"""Threads of native libraries, and whether a forked copy can do without them.

A fork copies only the thread that calls it. These libraries, each tested with its package, cope with that:

- OpenBLAS ends its threads before a fork, so this module does not see them.
- jemalloc holds its locks during a fork, and makes new threads. polars' cleaner only removes spilled files.
- Arrow makes a new pool in the copy, without the work of the old one, so its threads must be idle. numexpr makes a new
  pool if its process id has changed.
- GNU OpenMP waits for its old threads for ever. `renew` makes it start others.

Other libraries, such as polars and duckdb, compute nothing in a copy that lacks their threads, or hang. Most threads
have the name of their process, so names don't identify them. Instead, a thread counts as part of the library whose code
address is the outermost on its stack.

This serves honest programs: a program that misleads it spoils only the copy of its own process.
"""

from __future__ import annotations

import bisect
import os
import struct
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    Mapping = tuple[int, int, str]

_TASKS = "/proc/self/task"
_EXPENDABLE = ("jemalloc_bg_thd", "polars-ooc-clea")  # names; the kernel keeps 15 characters of each
_GNU_OPENMP, _ARROW = "libgomp", "libarrow"
_REVIVED = (_ARROW, "numexpr")
_C_LIBRARY = ("libc.", "libc-", "libpthread", "ld-musl")
_RUNTIMES = (*_C_LIBRARY, "ld-", "libstdc++", "libgcc_s", "libm.", "[")
_STACK_BYTES = 16384  # the part of a stack that is read; idle threads have 5 KiB
_WORD_BYTES = 8
# Attempts to find a thread waiting in the kernel, where its stack can be read, and seconds between two attempts:
# threads of OpenMP spin for a moment after their work.
_LOOKS, _LOOK_S = 20, 0.002
_MAX_NAMED = 3


def switches() -> dict[str, str]:
    """Returns how often each other thread has stopped running so far (its context switches)."""
    return {task: _switches(task) for task in _others()}


def lost(before: dict[str, str], *, renewed: bool) -> str:
    """Returns the threads that a copy made just now can't do without, in words; empty if there are none.

    `before` is the result of `switches` before the fork. `renewed`: the copy calls `renew`.
    """
    revived = (*_REVIVED, _GNU_OPENMP) if renewed else _REVIVED
    suspects = [task for task in _others() if _name(task) not in _EXPENDABLE]
    if not suspects:
        return ""
    code = _code()
    found: dict[str, str] = {}
    for task in suspects:
        library = _library(task, code)
        if _ARROW in library and _switches(task) != before.get(task):
            found.setdefault(f"{_package(library)}, at work", _name(task))
        elif not any(each in library for each in revived):
            found.setdefault(_package(library), _name(task))
    return ", ".join(f"{library} ({name})" for library, name in [*found.items()][:_MAX_NAMED])


def renew() -> None:
    """Makes GNU OpenMP compute in a copy. The process may have loaded several copies of it: packages bring their own.

    OpenMP reuses its pool only for the outermost level of threads. So this process enters a level of one thread and
    stays there; the levels below get new threads each time.
    """
    libraries = {path for _, _, path in _code() if _GNU_OPENMP in path}
    if libraries:
        import ctypes

        for path in libraries:
            ctypes.CDLL(path).GOMP_parallel_start(None, None, 1)


def _others() -> list[str]:
    """Returns the other threads of this process, the oldest first."""
    own = str(os.getpid())
    return sorted((task for task in os.listdir(_TASKS) if task != own), key=int)


def _read(task: str, name: str) -> str:
    try:
        with open(f"{_TASKS}/{task}/{name}") as file:
            return file.read().strip()
    except OSError:
        return ""  # it has ended, or this kernel does not say


def _name(task: str) -> str:
    return _read(task, "comm")


def _switches(task: str) -> str:
    return _read(task, "status").partition("voluntary_ctxt_switches")[2]


def _code() -> list[Mapping]:
    """Returns the mappings of code in this process: first address, end, and path."""
    found = []
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, rights, _, _, _, *path = line.split(None, 5)
            if "x" in rights and path:
                first, _, end = addresses.partition("-")
                found.append((int(first, 16), int(end, 16), path[0].strip()))
    return found


def _library(task: str, code: list[Mapping]) -> str:
    """Returns the path of the library that a thread belongs to; empty if unknown.

    The outermost frame is the C library's. Above it on the stack are the thread's variables, and then its descriptor,
    which begins with its own address on most machines: there the search ends.
    """
    starts = [first for first, _, _ in code]
    paths = []
    address, words = _stack(task)
    for word in words:
        if word == address:
            break
        address += _WORD_BYTES
        at = bisect.bisect(starts, word) - 1
        if at >= 0 and word < code[at][1]:
            paths.append(code[at][2])
    while paths and not os.path.basename(paths[-1]).startswith(_C_LIBRARY):
        paths.pop()
    return next((path for path in reversed(paths) if not os.path.basename(path).startswith(_RUNTIMES)), "")


def _stack(task: str) -> tuple[int, tuple[int, ...]]:
    """Returns a thread's current stack address, and the words of the stack from there."""
    pointer: Optional[int] = None
    for _ in range(_LOOKS):
        state = _read(task, "syscall").split()
        if len(state) > 2:
            pointer = int(state[-2], 16)
            break
        time.sleep(_LOOK_S)  # it runs
    if pointer is None:
        return 0, ()
    memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(memory, _STACK_BYTES, pointer)  # less if the stack is smaller
    except OSError:
        return 0, ()
    finally:
        os.close(memory)
    return pointer, struct.unpack_from(f"{len(data) // _WORD_BYTES}Q", data)


def _package(library: str) -> str:
    """Returns the name of a library's package, if its path contains it."""
    _, found, inner = library.rpartition("-packages/")
    if not found:
        return os.path.basename(library) or "an unknown library"
    return inner.partition("/")[0].lstrip("_").partition(".")[0]
