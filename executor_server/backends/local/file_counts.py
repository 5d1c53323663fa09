"""Sets limits that bubblewrap has no option for: on files, on terminals and, for some daemons, on inotify.

The machine has some thousand terminals. Inotify is limited under an ordinary user's daemon, whose sandboxes share that
user.

Each file, directory or link in a file system in memory takes kernel memory in addition to its content, which a size
limit does not count. tmpfs accepts a limit on inodes even after it is mounted. So a sandbox's file systems are
reconfigured from outside, once they are mounted and before anything is sent to the guest: programs then get ENOSPC.

The kernel reconfigures a mount only for a process that may mount there. Root may, in any sandbox. An ordinary user may
in the namespaces of its own sandbox, and only a single-threaded process can enter those, so this file is run as one:
`python -I -S file_counts.py PID MAX_FILES`. It imports no other module of ours.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys

_FILE_SYSTEMS = ("workspace", "tmp", "dev/shm")
# A reconfiguration resets other options to the kernel's defaults, so bubblewrap's modes are repeated.
_TERMINALS = {b"max": "64", b"mode": "620", b"ptmxmode": "0666"}
_WATCHERS = {"max_inotify_instances": b"16", "max_inotify_watches": b"8192"}
_TIMEOUT_S = 10.0
# System calls; the numbers are the same on every architecture.
_FSCONFIG, _FSPICK = 431, 433
# linux/mount.h
_FSPICK_CLOEXEC, _FSPICK_EMPTY_PATH = 1, 8
_FSCONFIG_SET_STRING, _FSCONFIG_CMD_RECONFIGURE = 1, 7
# linux/nsfs.h and linux/sched.h
_NS_GET_USERNS = 0xB701
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000

_libc = ctypes.CDLL(None, use_errno=True)


def limit_files(pid: int, max_files: int) -> None:
    """Limits each file system of the sandbox whose first process is `pid`. Blocks for a moment; raises OSError."""
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
    for file_system in _FILE_SYSTEMS:
        _reconfigure(f"{root}/{file_system}", {b"nr_inodes": str(max_files + 1)})  # its own directory takes one
    _reconfigure(f"{root}/dev/pts", _TERMINALS)


def _reconfigure(path: str, options: dict[bytes, str]) -> None:
    directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        context = _call(_FSPICK, ctypes.c_int(directory), b"", ctypes.c_uint(_FSPICK_CLOEXEC | _FSPICK_EMPTY_PATH))
    finally:
        os.close(directory)
    try:
        for option, value in options.items():
            _call(_FSCONFIG, ctypes.c_int(context), ctypes.c_uint(_FSCONFIG_SET_STRING), option, value.encode(), 0)
        _call(_FSCONFIG, ctypes.c_int(context), ctypes.c_uint(_FSCONFIG_CMD_RECONFIGURE), None, None, 0)
    finally:
        os.close(context)


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _enter(pid: int) -> None:
    """Enters the mount namespace of a process, after the user namespace that owns it."""
    settings = os.open("/proc/sys", os.O_PATH | os.O_CLOEXEC)  # the sandbox's own are read-only
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    users = fcntl.ioctl(mounts, _NS_GET_USERNS)
    for namespace, kind in ((users, _CLONE_NEWUSER), (mounts, _CLONE_NEWNS)):
        if _libc.setns(ctypes.c_int(namespace), ctypes.c_int(kind)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # The kernel shows a process the limits of its own user namespace there, which hold for those below, too.
    for name, most in _WATCHERS.items():
        fd = os.open(f"user/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=settings)
        os.write(fd, most)
        os.close(fd)


if __name__ == "__main__":
    _enter(int(sys.argv[1]))
    _limit_below("", int(sys.argv[2]))
