"""The files that a sandbox sees in a machine of the cloud: that machine's own, read-only, and memory to write to.

Nothing is visible unless it is put here. The new root is a file system in memory that holds, of each directory in the
machine's root, what lies on that one file system: what is mounted below stays away, and so do the machine's /root and
/run, where the agent of the cloud keeps its own, and single files in /. Like the other backends' sandboxes it has
/proc of its own, five devices, an empty /sys, and /workspace, /tmp and /dev/shm in memory, sized.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from . import kernel
from .kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT
from .place import GUEST_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

# Of the machine's root, beside what begins with a dot: what is made anew here, and what is no business of a sandbox's.
_NOT_SHOWN = frozenset(("boot", "dev", "lost+found", "media", "mnt", "proc", "root", "run", "sys", "tmp", "workspace"))
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"))
# As the Engine does (moby `oci/defaults.go`).
_MASKED_IN_PROC = (
    "acpi",
    "asound",
    "interrupts",
    "kcore",
    "keys",
    "latency_stats",
    "sched_debug",
    "scsi",
    "timer_list",
    "timer_stats",
)
_READ_ONLY_IN_PROC = ("bus", "fs", "irq", "sys", "sysrq-trigger")
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_HOSTS_PATH = "/run/executor/hosts"
# Of the file systems that hold a few directories, and the guest.
_SMALL_BYTES = 16 * 1024 * 1024
_EMPTY_BYTES = 4096


class Sizes:
    """The sizes of the file systems in memory."""

    __slots__ = ("disk_bytes", "max_files", "shm_bytes")

    def __init__(self, disk_bytes: int, shm_bytes: int, max_files: int) -> None:
        self.disk_bytes = disk_bytes  # of /workspace, and of /tmp
        self.shm_bytes = shm_bytes
        self.max_files = max_files  # in each of them


def build_root(place: str, guest: str, sizes: Sizes) -> None:
    """Puts it together at `place`, a directory, and makes it the root. Of a mount namespace of its own, please.

    `guest` is the path of the guest's archive. The pid namespace must be the sandbox's own by now, since /proc is that
    of whoever mounts it. Raises OSError.
    """
    os.umask(0o022)
    # What is mounted from here on must not appear in the machine; and nothing that it mounts later, in here.
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount_memory(place, "0755", _SMALL_BYTES)
    _show_system(place)
    _show_interpreter(place)
    _make_devices(place, sizes)
    _mount_proc(place)
    _mount_memory(_made(place, "sys"), "0555", _EMPTY_BYTES, MS_RDONLY)
    _put_guest(place, guest)
    for name in ("tmp", "workspace"):
        _mount_memory(_made(place, name), "1777", sizes.disk_bytes, max_files=sizes.max_files)
    # Last: no mount point could be made after it. It does not reach the mounts below.
    _seal(place)
    kernel.enter_root(place)


def _show_system(place: str) -> None:
    for name in sorted(os.listdir("/")):
        source = f"/{name}"
        if name in _NOT_SHOWN or name.startswith("."):
            continue
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):  # /bin -> usr/bin
            os.symlink(os.readlink(source), f"{place}/{name}")
        elif stat.S_ISDIR(mode):
            _bind_read_only(source, _made(place, name))


def _show_interpreter(place: str) -> None:
    """Wherever it is installed: somebody's home, or a file system of its own."""
    prefixes = {sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))}
    environment = os.path.dirname(os.path.dirname(sys.executable))
    if os.path.isfile(f"{environment}/pyvenv.cfg"):  # without site, the interpreter does not know that it is of one
        prefixes.add(environment)
    for prefix in sorted(prefixes - {"/"}):
        # An empty directory may be there: what is mounted upon it in the machine has stayed away.
        if not os.path.exists(place + prefix) or not os.path.samefile(place + prefix, prefix):
            _bind_read_only(prefix, _made(place, prefix))


def _make_devices(place: str, sizes: Sizes) -> None:
    _mount_memory(_made(place, "dev"), "0755", _SMALL_BYTES)
    for name in _DEVICES:
        target = f"{place}/dev/{name}"
        _write(target, b"")
        kernel.mount(f"/dev/{name}", target, flags=MS_BIND)
    for name, target in _DEVICE_LINKS:
        os.symlink(f"/proc/self/{target}", f"{place}/dev/{name}")
    _mount_memory(_made(place, "dev/shm"), "1777", sizes.shm_bytes, max_files=sizes.max_files)
    _seal(f"{place}/dev")


def _mount_proc(place: str) -> None:
    proc = _made(place, "proc")
    kernel.mount("proc", proc, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in _READ_ONLY_IN_PROC:
        if os.path.exists(f"{proc}/{name}"):
            _bind_read_only(f"{proc}/{name}", f"{proc}/{name}")
    for name in _MASKED_IN_PROC:
        masked = f"{proc}/{name}"
        if os.path.isdir(masked):
            _mount_memory(masked, "0555", _EMPTY_BYTES, MS_RDONLY)
        elif os.path.exists(masked):
            kernel.mount("/dev/null", masked, flags=MS_BIND)


def _put_guest(place: str, guest: str) -> None:
    """A copy: where the archive lies, and who may read it there, is not the sandbox's business."""
    _mount_memory(_made(place, "run"), "0755", _SMALL_BYTES)
    os.mkdir(f"{place}/run/executor")
    with open(guest, "rb") as file:
        _write(place + GUEST_PATH, file.read())
    _write(place + _HOSTS_PATH, _HOSTS.encode())
    hosts = f"{place}/etc/hosts"
    if os.path.isfile(hosts) and not os.path.islink(hosts):
        kernel.mount(place + _HOSTS_PATH, hosts, flags=MS_BIND)
        _seal(hosts)
    _seal(f"{place}/run")


def _mount_memory(target: str, mode: str, size_bytes: int, flags: int = 0, max_files: Optional[int] = None) -> None:
    options = f"mode={mode},size={size_bytes}"
    if max_files is not None:
        options += f",nr_inodes={max_files + 1}"  # its own directory is one
    kernel.mount("tmpfs", target, "tmpfs", flags | MS_NOSUID | MS_NODEV, options)


def _bind_read_only(source: str, target: str) -> None:
    """What lies on the file system of `source`, and not what is mounted below it."""
    try:
        kernel.mount(source, target, flags=MS_BIND)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # In a user namespace, what the mounts below cover may not be uncovered: they come along, or nothing does.
        kernel.mount(source, target, flags=MS_BIND | MS_REC)
        for mounted in _mounts_below(target):
            _seal(mounted)
    _seal(target)


def _seal(target: str) -> None:
    """Makes one mount read-only. In a user namespace none of the flags that it has may be taken away."""
    kept = MS_NOEXEC if os.statvfs(target).f_flag & os.ST_NOEXEC else 0
    kernel.mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def _mounts_below(target: str) -> list[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        places = [line.split(b" ")[4].decode("unicode_escape") for line in file]
    return [place for place in places if place.startswith(f"{target}/")]


def _made(place: str, name: str) -> str:
    target = f"{place}/{name.lstrip('/')}"
    os.makedirs(target, exist_ok=True)
    return target


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
