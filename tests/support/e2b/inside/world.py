"""Making a small virtual machine of namespaces: what its first process does before it serves.

Bubblewrap starts us as the host's root, in namespaces that see nothing of the host but read-only directories. That is
not yet a virtual machine's root: that one may mount, unshare and change user, and has no rights outside. So a second
set of namespaces is made inside, with a user namespace in which 0 to 65535 are host users without rights:

    bubblewrap's pid 1 (host's root, waits)  ->  a fork of it (unshares, waits)  ->  pid 1 of the machine
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import shutil
import socket
import struct
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40

IDS = 65_536
NEW_ROOT = "/machine"

_libc = ctypes.CDLL(None, use_errno=True)


def become_machine(config: dict[str, Any]) -> None:
    """Returns in the machine's first process only; the two on the way end with it, with its status."""
    # Bubblewrap's own would have parts of it covered, and then no other may be mounted further inside.
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    child = os.fork()
    if child:
        os.close(config["socket"])
        os.read(ready_read, 1)
        base = config["first_id"]
        for kind in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{kind}", "w") as file:
                file.write(f"0 {base} {IDS}\n")
        os.write(mapped_write, b"m")
        _wait_and_exit(child)
    kinds = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    if not config["has_network"]:
        kinds |= CLONE_NEWNET
    _check(_libc.unshare(kinds), "unshare")
    os.write(ready_write, b"r")
    os.read(mapped_read, 1)
    for fd in (ready_read, ready_write, mapped_read, mapped_write):
        os.close(fd)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.setgroups([])
    child = os.fork()
    if child:
        os.close(config["socket"])
        _wait_and_exit(child)
    _make_root(config)
    socket.sethostname("e2b")
    if config["has_network"]:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING))


def _wait_and_exit(child: int) -> None:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _make_root(config: dict[str, Any]) -> None:
    """A file system that the machine's root may change as it likes, with the host's programs in it, read-only."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NODEV, f"mode=0755,size={config['disk_bytes']}")
    os.umask(0o022)
    for name in ("dev", "etc", "home/user", "opt", "proc", "root", "run", "srv", "tmp", "var/tmp", "usr"):
        os.makedirs(f"{NEW_ROOT}/{name}")
    for name in ("tmp", "var/tmp"):
        os.chmod(f"{NEW_ROOT}/{name}", 0o1777)
    for path in config["directories"]:
        os.makedirs(NEW_ROOT + path, exist_ok=True)
        if path.startswith("/etc/"):  # a machine's own /etc is one file system, which a sandbox in it sees as a whole
            shutil.copytree(path, NEW_ROOT + path, symlinks=True, dirs_exist_ok=True)
        else:
            _mount(path, NEW_ROOT + path, None, MS_BIND | MS_REC)
    for path, target in config["links"]:
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        os.symlink(target, NEW_ROOT + path)
    for path, prefix in config["hidden"]:
        _hide(path, prefix)
    for name, text in config["etc"].items():
        with open(f"{NEW_ROOT}/etc/{name}", "w") as file:
            file.write(text)
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        with open(f"{NEW_ROOT}/dev/{name}", "w"):
            pass
        _mount(f"/dev/{name}", f"{NEW_ROOT}/dev/{name}", None, MS_BIND)
    for name in ("shm", "pts"):
        os.mkdir(f"{NEW_ROOT}/dev/{name}")
    _mount("tmpfs", f"{NEW_ROOT}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={config['disk_bytes']}")
    _mount("devpts", f"{NEW_ROOT}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{NEW_ROOT}/dev/{name}")
    _mount("proc", f"{NEW_ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{NEW_ROOT}/.old")
    _check(_libc.pivot_root(NEW_ROOT.encode(), f"{NEW_ROOT}/.old".encode()), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/.old", MNT_DETACH), "umount2")
    os.rmdir("/.old")
    home = pwd.getpwnam("user")
    os.chown("/home/user", home.pw_uid, home.pw_gid)


def _hide(path: str, prefix: str) -> None:
    """Makes a directory of programs one that lacks those whose name begins with `prefix`."""
    place = NEW_ROOT + path
    if not os.path.isdir(place):
        return
    kept = "/.programs" + path
    os.makedirs(NEW_ROOT + kept)
    _mount(path, NEW_ROOT + kept, None, MS_BIND | MS_REC)
    _mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for name in os.listdir(NEW_ROOT + kept):
        if not name.startswith(prefix):
            os.symlink(f"{kept}/{name}", f"{place}/{name}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} at {target}")
