"""Enters a user namespace that belongs to a user of the host that is not root, for root's daemon.

Instances of inotify, queued signals and more are counted for the user of a process, and once more for the owner of its
user namespace. So a sandbox's namespace must not be root's, whose own programs it could leave none.
"""

from __future__ import annotations

import os
import sys

from ..wire import kernel, privileges

# linux/capability.h: KILL, SETPCAP, SYS_PTRACE, SYS_ADMIN.
_NEEDED = 1 << 5 | 1 << 8 | 1 << 19 | 1 << 21


def main() -> None:
    """Runs as `python -c BOOT OWNER INSIDE PROGRAM ARGUMENT…`: executes the program as the namespace's user 0.

    That stays the host's root, who can read the program's files; INSIDE is the owner's number in the namespace.
    """
    owner, inside, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    program = os.open(path, os.O_PATH | os.O_CLOEXEC)  # later, root has no rights over other users' directories
    enter_namespaces(owner, f"0 0 1\n{inside} {owner} 1\n")
    os.execve(program, sys.argv[3:], {})


def has_rights() -> bool:
    """True if root reaches into namespaces that are not its own. If not, as in a container, they must stay root's."""
    with open("/proc/self/status") as file:
        effective = int(file.read().partition("CapEff:")[2].split()[0], 16)
    return effective & _NEEDED == _NEEDED


def enter_namespaces(owner: int, users: str, others: int = 0) -> None:
    """Enters a user namespace of the owner's, with `users` for its map, and `others`, as its user 0.

    A process outside of it writes the map. Both keep root's rights throughout: without them some hosts allow no user
    namespace, and no host allows a map of other users.
    """
    os.setgroups([])
    if has_rights():
        privileges.keep_capabilities()
        os.setresuid(-1, owner, -1)
    read, write = os.pipe()
    done_read, done_write = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            os.close(write)
            if os.read(read, 1):
                for name in ("uid_map", "gid_map"):
                    with open(f"/proc/{os.getppid()}/{name}", "w") as file:
                        file.write(users)
                os.write(done_write, b"1")
        finally:
            os._exit(0)
    os.close(done_write)
    kernel.unshare(kernel.CLONE_NEWUSER | others)
    os.write(write, b"1")
    if os.read(done_read, 1) != b"1":
        raise SystemExit("the map of users can't be written")
    os.waitpid(writer, 0)
    for fd in (read, write, done_read):
        os.close(fd)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
