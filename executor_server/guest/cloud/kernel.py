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
# The pid namespace is made before, by the parent: unshare(2) puts only the next child into it, not the caller.
SANDBOX_NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP

# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2

# Numbers of the system call by os.uname().machine; not every C library has a function for it.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc: Any = ctypes.CDLL(None, use_errno=True)


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


def _check(result: int, path: Optional[str] = None) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
