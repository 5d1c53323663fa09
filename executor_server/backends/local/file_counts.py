"""Limits how many files a sandbox can make, which bubblewrap has no option for.

Each file, directory or link in a file system in memory takes kernel memory beside its content, so a size alone bounds
none of it. tmpfs takes a number of inodes, also later. So a sandbox's file systems are reconfigured from outside, when
they are there and before the guest has been told anything: programs then meet ENOSPC.

Whoever reconfigures a mount has to be able to mount where it is asked. Root is, for any sandbox. An ordinary user is
not, but for the namespaces of its own sandbox; it takes a process of one thread to enter those, so this file is run as
one: `python -I -S file_counts.py PID MAX_FILES`. It imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys

_PLACES = ("workspace", "tmp", "dev/shm")
_TIMEOUT_S = 10.0
# The same numbers on every architecture.
_FSCONFIG, _FSPICK = 431, 433
# linux/mount.h
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 1, 8
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7
# linux/nsfs.h and linux/sched.h
_NS_GET_USERNS = 0xB701
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000

_libc = ctypes.CDLL(None, use_errno=True)


def limit_files(pid: int, max_files: int) -> None:
    """For the sandbox whose first process this is, in each of its file systems. Blocks for a moment; raises OSError."""
    if os.geteuid() == 0:
        _limit_below(f"/proc/{pid}/root", max_files)
        return
    command = [sys.executable, "-I", "-S", __file__, str(pid), str(max_files)]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env={}, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it took longer than {_TIMEOUT_S:g} s") from error
    if ended.returncode != 0:
        raise OSError(ended.stderr.strip().rpartition("\n")[2])


def _limit_below(root: str, max_files: int) -> None:
    for place in _PLACES:
        directory = os.open(f"{root}/{place}", os.O_PATH | os.O_CLOEXEC)
        try:
            _limit(directory, max_files)
        finally:
            os.close(directory)


def _limit(directory: int, max_files: int) -> None:
    context = _call(_FSPICK, ctypes.c_int(directory), b"", ctypes.c_uint(_FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH))
    try:
        value = str(max_files + 1).encode()  # the file system's own directory is one
        _call(_FSCONFIG, ctypes.c_int(context), ctypes.c_uint(_FSCONFIG_SET_STRING), b"nr_inodes", value, 0)
        _call(_FSCONFIG, ctypes.c_int(context), ctypes.c_uint(_FSCONFIG_CMD_RECONFIGURE), None, None, 0)
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _enter(pid: int) -> None:
    """The mount namespace of a process, by way of the user namespace that owns it."""
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    users = fcntl.ioctl(mounts, _NS_GET_USERNS)
    for namespace, kind in ((users, _CLONE_NEWUSER), (mounts, _CLONE_NEWNS)):
        if _libc.setns(ctypes.c_int(namespace), ctypes.c_int(kind)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    _enter(int(sys.argv[1]))
    _limit_below("", int(sys.argv[2]))
