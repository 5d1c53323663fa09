"""Gives up rights of a process: capabilities, later gains by executed programs, system calls.

The callers are the programs that turn their own process into a sandbox (guest/cloud/namespaces.py, guest/fork_server),
and the egress proxy. This module imports ctypes (6 ms), so no program that runs in every sandbox imports it. The order
of the steps matters; each caller explains its own.
"""

from __future__ import annotations

import ctypes
import signal

from .kernel import check, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS, _PR_SET_NO_NEW_PRIVS = 22, 24, 28, 38
_SECBIT_NO_SETUID_FIXUP = 4
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8  # struct sock_filter
_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS

# linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def drop_bounding_set(kept: Collection[int] = ()) -> None:
    """Drops all but `kept` from the bounding set, so that executed programs can't gain them. Needs CAP_SETPCAP.

    Raises OSError, as do all functions here.
    """
    for capability in range(_MAX_CAPABILITIES):
        if capability in kept:
            continue
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            if capability == 0:
                raise
            return  # the kernel knows no higher number


def drop_capabilities(kept: Collection[int] = ()) -> None:
    """Drops all but `kept` from the sets of this process. They are not inheritable, so none can be ambient."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = (sum(1 << bit % 32 for bit in kept if bit // 32 == word) for word in (0, 1))
    # Twice: effective, permitted, inheritable.
    sets = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    check(libc.capset(header, sets))


def keep_capabilities() -> None:
    """Lets this process keep its rights when it changes its user, until it enters another user namespace."""
    _prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP)


def gain_no_privileges() -> None:
    """Sets no_new_privs: setuid bits and file capabilities have no effect any more."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls(program: bytes) -> None:
    """Loads a classic BPF program, for this process and its descendants. Needs `gain_no_privileges` before."""
    count, rest = divmod(len(program), _INSTRUCTION_BYTES)
    if rest or not 0 < count <= _MAX_INSTRUCTIONS:
        raise OSError(f"a filter of {len(program)} bytes")
    holder = _FilterProgram(count, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(holder))


def show_memory() -> None:
    """Undoes `hide_memory` and the effect of a change of user: this process owns its files in /proc again."""
    _prctl(_PR_SET_DUMPABLE, 1)


def hide_memory() -> None:
    """Makes this process non-dumpable: no other process of its user may trace it or read its memory, and it dumps no
    core. A change of user undoes this, so call it after the change."""
    _prctl(_PR_SET_DUMPABLE, 0)


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends. A change of user undoes this."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def name_process(name: str) -> None:
    """Sets the name that `ps` shows for this process, at most 15 bytes of it."""
    check(libc.prctl(ctypes.c_int(_PR_SET_NAME), name.encode(), 0, 0, 0))


def _prctl(option: int, value: int, pointer: Any = None) -> None:
    check(libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer or ctypes.c_ulong(0), 0, 0))
