"""System calls that make a sandbox and that Python has no function for, with their errors as OSError.

Only the command that makes namespaces uses them, once for each sandbox; the guest itself does not import ctypes (6 ms).
"""

from __future__ import annotations

import ctypes
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2

# linux/prctl.h
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 22, 24, 38
_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8  # struct sock_filter
_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS

# linux/capability.h
_CAPABILITY_VERSION_3 = 0x20080522
_MAX_CAPABILITIES = 64

# Numbers of the system call by os.uname().machine; not every C library has a function for it.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc: Any = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def unshare(namespaces: int) -> None:
    """Moves this process into new namespaces. Raises OSError, as do all functions here."""
    _check(_libc.unshare(ctypes.c_int(namespaces)))


def mount(source: str, target: str, kind: Optional[str] = None, flags: int = 0, options: str = "") -> None:
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        target,
    )


def enter_root(directory: str) -> None:
    """Makes a mount point the root of this process's mount namespace, and detaches all that was mounted before."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(f"the number of pivot_root is not known for {machine}")
    os.chdir(directory)
    # pivot_root(".", ".") stacks the old root on the new one, so it needs no directory. Then it is detached.
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[machine]), b".", b"."), directory)
    _check(_libc.umount2(b".", ctypes.c_int(_MNT_DETACH)))
    os.chdir("/")


def drop_bounding_set() -> None:
    """Empties the bounding set: no program that is executed later gains a capability. Needs CAP_SETPCAP."""
    for capability in range(_MAX_CAPABILITIES):
        try:
            _prctl(_PR_CAPBSET_DROP, capability)
        except OSError:
            if capability == 0:
                raise
            return  # the kernel knows no higher number


def drop_capabilities() -> None:
    """Empties all sets of this process. A capability that is not inheritable can't be ambient."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing))


def gain_no_privileges() -> None:
    """Sets no_new_privs: setuid bits and file capabilities have no effect from here on."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def filter_system_calls(program: bytes) -> None:
    """Loads a classic BPF program, for this process and its descendants. Needs `gain_no_privileges` before."""
    count, rest = divmod(len(program), _INSTRUCTION_BYTES)
    if rest or not 0 < count <= _MAX_INSTRUCTIONS:
        raise OSError(f"a filter of {len(program)} bytes")
    holder = _FilterProgram(count, program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(holder))


def _prctl(option: int, value: int, pointer: Any = None) -> None:
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer or ctypes.c_ulong(0), 0, 0))


def _check(result: int, path: Optional[str] = None) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
