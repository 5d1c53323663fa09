"""Starts a fork server on the host: its namespaces, its files, its first process.

Theory of operation. A fork server needs rights over namespaces, because it creates those of sandboxes, and it imports
the image's modules. So it has a user namespace of its own, in which its user 0 has these rights. The namespace maps
nothing of the host's root: 0 is a host user that owns nothing, and the other ids are those of sandboxes. Under an
ordinary user's daemon, 0 is that user, and there is no other id. So a package that attacks during its import is
confined like an ordinary user's sandbox, except for the system call filter: it sees other mounts, processes and users
than the host's.

It can attack the sandboxes of this fork server, all of which it owns, because it is in the template process and in each
fork before its walls are up. Every sandbox of the fork server trusts the code imported ahead. Hence each image has its
own fork server. The policy's `tenant` gives each tenant its own, and `off` disables it.

An image's files may be where only root can go (/root/.pyenv), and the fork server's user 0 is not root. So root copies
the mounts (open_tree) before it enters the user namespace, and mounts the copies inside. This needs Linux 5.12. If it
fails, the daemon uses bubblewrap.

The steps, and the reasons for their order:

1. Close descriptors and leave groups: a namespace does not confine what a process already has.
2. As root, copy the mounts: later they are out of reach. An ordinary user does it after 3, when it has the right.
3. Create all namespaces at once. This user namespace must own the pid namespace: the template process returns to it
   (setns) after it creates another one, which takes CAP_SYS_ADMIN over the owner.
4. A process outside, with the right to do so, writes the map of users.
5. A fork becomes the first process of the pid namespace. It builds the root, because /proc shows its mounter's
   namespace, drops the rights that it no longer needs, and executes the image's Python.

This process stays as the parent. So the daemon notices the end of its own child, and the fork server leaves no zombie
on a host whose first process reaps none. By then it has no descriptor of the fork server.
"""

from __future__ import annotations

import os
import stat
import sys

from ..wire import kernel, privileges
from ..wire.fork_server_messages import PARENT_NAME, fork_server_boot
from ..wire.kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT
from ..wire.lean import loads, socket
from ..wire.paths import GUEST_PATH
from .owner import enter_namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Exists on every host; the new root is assembled on it, in the fork server's own mount namespace.
_BASE = "/tmp"
_ROOT_BYTES = 16 * 1024 * 1024
_SCRATCH_BYTES = 64 * 1024 * 1024
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_DEVICE_LINKS = (
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("/proc/kcore", "core"),
    ("pts/ptmx", "ptmx"),
)
# linux/capability.h: SETGID, SETUID, SETPCAP, NET_ADMIN, SYS_ADMIN.
_KEPT_CAPABILITIES = (6, 7, 8, 12, 21)
# SETFCAP: since Linux 5.12 a map that has its parent's user 0 requires it. Under an ordinary user's daemon, a sandbox
# can have no other user.
_KEPT_WITHOUT_USERS = (31,)
_HOSTNAME = "sandbox"
_NAMESPACES = kernel.CLONE_NEWPID | kernel.SANDBOX_NAMESPACES


def main() -> None:
    """Runs as `python -c BOOT CONFIG`, CONFIG a JSON object:

    users        [host user of 0, first user of sandboxes, their number]; null for the daemon's own user alone
    root         the files: ["dir", path], ["link", target, path], ["bind", source, path], in order
    python       the image's interpreter
    environment  the variables of every sandbox
    modules      what the template process imports
    fds          [socket of the fork server, pipe that the daemon holds open]
    """
    privileges.name_process(PARENT_NAME)
    config = loads(sys.argv[1])
    os.umask(0o022)
    keep = sorted(int(fd) for fd in config["fds"])
    users = config["users"]
    copies: list[int] = []
    if users is not None:
        own, first, count = (int(number) for number in users)
        copies = _copy_mounts(config["root"])
        enter_namespaces(own, f"0 {own} 1\n{first} {first} {count}\n", _NAMESPACES)
    else:
        uid, gid = os.getuid(), os.getgid()
        kernel.unshare(kernel.CLONE_NEWUSER | _NAMESPACES)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
        copies = _copy_mounts(config["root"])
    child = os.fork()
    if child == 0:
        try:
            socket.sethostname(_HOSTNAME)  # before any module is imported, which may keep the name (`platform` does)
            _build_root(config["root"], copies)
            _run_init(config, keep)
        except OSError as error:
            sys.stderr.write(f"no fork server: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)
    kernel.close_descriptors_from(3)
    _, status = os.waitpid(child, 0)
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _copy_mounts(root: list[list[str]]) -> list[int]:
    """Copies the bound mounts in order, read-only from the start, so that no later mount can change that."""
    copies = []
    for entry in root:
        if entry[0] == "bind":
            fd = kernel.copy_mounts(entry[1])
            kernel.set_mount_attributes(
                fd, kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV
            )
            copies.append(fd)
    return copies


def _build_root(root: list[list[str]], copies: list[int]) -> None:
    # First: a shared mount would carry the mounts below to the host. Its own copy of the host's mounts is a slave of
    # them by the user namespace already; private also keeps later ones of the host out.
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    devices = [kernel.copy_mounts(f"/dev/{name}") for name in _DEVICES]
    for fd in devices:
        kernel.set_mount_attributes(fd, kernel.MOUNT_ATTR_NOSUID)
    kernel.mount("tmpfs", _BASE, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,size={_ROOT_BYTES}")
    # For files that modules write during their import; each sandbox replaces it with its own. Before the image, which
    # may be below it.
    os.mkdir(f"{_BASE}/tmp")
    kernel.mount("tmpfs", f"{_BASE}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={_SCRATCH_BYTES}")
    remaining = iter(copies)
    for entry in root:
        if entry[0] == "link":
            os.makedirs(os.path.dirname(_BASE + entry[2]), exist_ok=True)
            os.symlink(entry[1], _BASE + entry[2])
        elif entry[0] == "dir":
            os.makedirs(_BASE + entry[1], exist_ok=True)
        else:
            _mount(next(remaining), _BASE + entry[2])
    _make_devices(devices)
    # Nothing covers any of it: the kernel lets a user namespace mount another /proc only if it sees one in full.
    os.makedirs(f"{_BASE}/proc", exist_ok=True)
    kernel.mount("proc", f"{_BASE}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{_BASE}/workspace")
    kernel.mount("none", _BASE, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    kernel.enter_root(_BASE)


def _make_devices(devices: list[int]) -> None:
    os.makedirs(f"{_BASE}/dev", exist_ok=True)
    kernel.mount("tmpfs", f"{_BASE}/dev", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,size={_ROOT_BYTES}")
    for name, fd in zip(_DEVICES, devices):
        _write(f"{_BASE}/dev/{name}", "")
        kernel.mount_copy(fd, f"{_BASE}/dev/{name}")
        os.close(fd)
    for target, name in _DEVICE_LINKS:
        os.symlink(target, f"{_BASE}/dev/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{_BASE}/dev/{name}")
    kernel.mount("none", f"{_BASE}/dev", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount(copy: int, target: str) -> None:
    """Mounts a copy of a directory or of a file."""
    if stat.S_ISDIR(os.fstat(copy).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    kernel.mount_copy(copy, target)
    os.close(copy)


def _run_init(config: dict[str, Any], keep: list[int]) -> None:
    """Executes the image's Python as the fork server's first process.

    It gets only the rights that its template process needs; this also confines programs that a module starts during its
    import. The environment variables are those of sandboxes, with nothing of the daemon's.
    """
    os.chdir("/")
    os.setsid()
    kept = _KEPT_CAPABILITIES if config["users"] is not None else _KEPT_CAPABILITIES + _KEPT_WITHOUT_USERS
    privileges.drop_bounding_set(kept)
    privileges.drop_capabilities(kept)
    privileges.gain_no_privileges()
    for fd in keep:
        os.set_inheritable(fd, True)
    program = fork_server_boot(GUEST_PATH, "init")
    arguments = [str(fd) for fd in config["fds"]] + [str(name) for name in config["modules"]]
    os.execve(config["python"], [config["python"], "-I", "-S", "-c", program, *arguments], config["environment"])


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
