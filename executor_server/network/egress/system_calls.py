"""The system call filter of the proxy's process: a sandbox's filter, without the calls that the proxy never makes.

The proxy creates sockets and threads and reads files. If it is taken over, it can't run a program, create a process,
change a file, listen or signal a process.
"""

from __future__ import annotations

from executor_server.backends import Alternatives, Argument, filter_program

# Programs and processes; changes of files; shared objects of System V; listeners; signals.
_NAMES = """
    execve execveat fork vfork
    chmod chown creat fallocate fchmod fchmodat fchmodat2 fchown fchownat fremovexattr fsetxattr futimesat lchown link
    linkat lremovexattr lsetxattr mkdir mkdirat mknod mknodat openat2 removexattr removexattrat rename renameat
    renameat2 rmdir setxattr setxattrat symlink symlinkat truncate unlink unlinkat utime utimensat utimes
    msgget semget shmget
    listen
    kill pidfd_send_signal process_mrelease tkill
"""
REFUSED = frozenset(_NAMES.split())

# include/uapi/asm-generic/fcntl.h: the flags for writing, creating, truncating, and files without a name.
_CHANGING = 0x3 | 0x40 | 0x200 | 0x400000
# linux/sched.h
_CLONE_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_CLONE_THREAD = 0x00010000

_RULES: dict[str, Alternatives] = {
    "open": ((Argument(1, (0,), _CHANGING),),),
    "openat": ((Argument(2, (0,), _CHANGING),),),
    "clone": ((Argument(0, (_CLONE_THREAD,), _CLONE_THREAD | _CLONE_NEW_NAMESPACES),),),
}


def proxy_filter(machine: str | None = None) -> bytes:
    """The filter for this machine. Raises UnsupportedArchitecture."""
    return filter_program(machine, refused=REFUSED, rules=_RULES)
