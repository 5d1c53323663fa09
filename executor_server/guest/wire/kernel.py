"""System calls that Python has no function for. Errors are raised as OSError.

Used by the processes that make sandboxes (the command that makes namespaces in a machine of the cloud, and the fork
server) and by the egress proxy. No other process of a guest imports this module, because ctypes takes 6 ms to import.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

from .lean import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

# linux/sched.h
CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
# The parent has made the pid namespace before: unshare(2) moves only the next child into it, not the caller.
SANDBOX_NAMESPACES = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET | CLONE_NEWCGROUP

# linux/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x2000, 0x4000, 0x40000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
_MNT_DETACH = 2
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4

# linux/fcntl.h
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000

# The number of pivot_root by os.uname().machine; not every C library has a function for it.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# These are the same on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _CLOSE_RANGE, _MOUNT_SETATTR = 428, 429, 436, 442
_LAST_DESCRIPTOR = 2**32 - 1

# linux/sockios.h, linux/if.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

libc: Any = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    """struct mount_attr"""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("users", ctypes.c_uint64),
    )


def unshare(namespaces: int) -> None:
    """Moves this process into new namespaces. Raises OSError, as do all functions here."""
    check(libc.unshare(ctypes.c_int(namespaces)))


def enter_namespace(fd: int, kind: int) -> None:
    """Moves this process, or for a pid namespace its future children, into an existing namespace."""
    check(libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)))


def mount(source: str, target: str, kind: Optional[str] = None, flags: int = 0, options: str = "") -> None:
    check(
        libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        target,
    )


def unmount(target: str) -> None:
    """Detaches a mount, even one in use."""
    check(libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), target)


def copy_mounts(path: str) -> int:
    """Returns a descriptor of a private copy of the mounts at and below `path`, to be mounted elsewhere.

    Linux 5.2. The copy belongs to no mount namespace yet, so another user namespace can mount it.
    """
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_RECURSIVE)
    return check(libc.syscall(ctypes.c_long(_OPEN_TREE), ctypes.c_int(_AT_FDCWD), os.fsencode(path), flags), path)


def set_mount_attributes(fd: int, attributes: int) -> None:
    """Adds attributes (MOUNT_ATTR_…) to a copy, and to all mounts in it. Linux 5.12."""
    values = _MountAttributes(attributes, 0, MS_PRIVATE, 0)
    flags = ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE)
    size = ctypes.c_size_t(ctypes.sizeof(values))
    check(libc.syscall(ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(fd), b"", flags, ctypes.byref(values), size))


def mount_copy(fd: int, target: str) -> None:
    """Mounts a copy at `target`."""
    here, flags = ctypes.c_int(_AT_FDCWD), ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
    check(
        libc.syscall(ctypes.c_long(_MOVE_MOUNT), ctypes.c_int(fd), b"", here, os.fsencode(target), flags),
        target,
    )


def enter_root(directory: str) -> None:
    """Makes a mount point the root of this process's mount namespace, and detaches the old root."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(f"the number of pivot_root is not known for {machine}")
    os.chdir(directory)
    # pivot_root(".", ".") stacks the old root on the new one, without a directory for it. Then it is detached.
    check(libc.syscall(ctypes.c_long(_PIVOT_ROOT[machine]), b".", b"."), directory)
    check(libc.umount2(b".", ctypes.c_int(_MNT_DETACH)))
    os.chdir("/")


def bring_up_loopback() -> None:
    """Brings up loopback in this process's network namespace."""
    with_kernel = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(with_kernel.fileno(), _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    with_kernel.close()


def close_descriptors_from(first: int) -> None:
    """Closes every descriptor from `first` on. Linux 5.9."""
    check(
        libc.syscall(
            ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first), ctypes.c_uint(_LAST_DESCRIPTOR), ctypes.c_uint(0)
        )
    )


def check(result: int, path: Optional[str] = None) -> int:
    """Returns the result of a system call. Raises OSError if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result
