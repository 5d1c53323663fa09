"""The files of a sandbox in a cloud machine: the machine's own, read-only, and writable memory.

This is an allow-list. The new root is a file system in memory. Each directory of the machine's root is bound into it
without the mounts below it, so a secret that the cloud mounts somewhere stays outside. /root and /run, where the
cloud's agent keeps its files, and single files in / are omitted. As with other backends, the sandbox has a /proc of its
own, five devices, an empty /sys, and /workspace, /tmp and /dev/shm in memory of limited size.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from ..wire import kernel
from ..wire.kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT
from ..wire.paths import ENVIRONMENT_PATH, GUEST_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

# Names in the machine's root that are not bound, like those with a leading dot: replaced here, or private to it.
_NOT_SHOWN = frozenset(("boot", "dev", "lost+found", "media", "mnt", "proc", "root", "run", "sys", "tmp", "workspace"))
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVPTS_OPTIONS = "newinstance,ptmxmode=0666,mode=620,max=256"
_DEVICE_LINKS = (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"))
# As in Docker (moby `oci/defaults.go`).
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
# Bytes of a file system that holds a few directories or the guest.
_SMALL_BYTES = 16 * 1024 * 1024
_EMPTY_BYTES = 4096


class Sizes:
    """The sizes of the file systems in memory."""

    __slots__ = ("disk_bytes", "max_files", "shm_bytes")

    def __init__(self, disk_bytes: int, shm_bytes: int, max_files: int) -> None:
        self.disk_bytes = disk_bytes  # of /workspace and /tmp each
        self.shm_bytes = shm_bytes
        self.max_files = max_files  # in each of them


def build_root(root: str, guest: str, sizes: Sizes, environment: Optional[str] = None) -> None:
    """Builds the file system at the directory `root`, and makes it the root of this mount namespace.

    The mount and pid namespaces must already be the sandbox's own: /proc shows its mounter's namespace.
    `guest` is the path of the guest's archive, `environment` the directory of the environment. Raises OSError.
    """
    os.umask(0o022)
    # First: a shared mount would propagate the mounts below to the machine, and the machine's later ones to here.
    kernel.mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _mount_memory(root, "0755", _SMALL_BYTES)
    _show_system(root)
    for name in ("tmp", "workspace"):
        _mount_memory(_make_directory(root, name), "1777", sizes.disk_bytes, max_files=sizes.max_files)
    if os.path.isdir(f"{root}/var/tmp"):  # the same files, so that one limit holds for both
        kernel.mount(f"{root}/tmp", f"{root}/var/tmp", flags=MS_BIND)
    # After /tmp, which would hide an environment in it.
    _show_interpreter(root)
    _make_devices(root, sizes)
    _mount_proc(root)
    _mount_memory(_make_directory(root, "sys"), "0555", _EMPTY_BYTES, MS_RDONLY)
    _put_guest(root, guest)
    if environment is not None:
        _bind_read_only(environment, _make_directory(root, ENVIRONMENT_PATH))
    _seal(f"{root}/run")
    # After the last mount point is created: afterwards none can be. The mounts below keep their own flags.
    _seal(root)
    kernel.enter_root(root)


def _show_system(root: str) -> None:
    for name in sorted(os.listdir("/")):
        source = f"/{name}"
        if name in _NOT_SHOWN or name.startswith("."):
            continue
        mode = os.lstat(source).st_mode
        if stat.S_ISLNK(mode):  # /bin -> usr/bin
            os.symlink(os.readlink(source), f"{root}/{name}")
        elif stat.S_ISDIR(mode):
            _bind_read_only(source, _make_directory(root, name))


def _show_interpreter(root: str) -> None:
    """Binds the directories of this Python, which may be in a home or on another file system."""
    prefixes = {sys.base_prefix, sys.prefix, os.path.dirname(os.path.realpath(sys.executable))}
    environment = os.path.dirname(os.path.dirname(sys.executable))
    if os.path.isfile(f"{environment}/pyvenv.cfg"):  # with -S the interpreter ignores it
        prefixes.add(environment)
    for prefix in sorted(prefixes - {"/"}):
        # An empty directory may exist: the mount point of something that `_show_system` omitted.
        if not os.path.exists(root + prefix) or not os.path.samefile(root + prefix, prefix):
            _bind_read_only(prefix, _make_directory(root, prefix))


def _make_devices(root: str, sizes: Sizes) -> None:
    _mount_memory(_make_directory(root, "dev"), "0755", _SMALL_BYTES)
    for name in _DEVICES:
        target = f"{root}/dev/{name}"
        _write(target, b"")
        kernel.mount(f"/dev/{name}", target, flags=MS_BIND)
    for name, target in _DEVICE_LINKS:
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    # Terminals of its own: the host's are limited in number and shared with other sandboxes.
    terminals = _make_directory(root, "dev/pts")
    kernel.mount("devpts", terminals, "devpts", MS_NOSUID | MS_NOEXEC, _DEVPTS_OPTIONS)
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    _mount_memory(_make_directory(root, "dev/shm"), "1777", sizes.shm_bytes, max_files=sizes.max_files)
    _seal(f"{root}/dev")


def _mount_proc(root: str) -> None:
    proc = _make_directory(root, "proc")
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


def _put_guest(root: str, guest: str) -> None:
    """Copies the archive, so that its path and permissions in the machine don't matter to the sandbox."""
    _mount_memory(_make_directory(root, "run"), "0755", _SMALL_BYTES)
    os.mkdir(f"{root}/run/executor")
    with open(guest, "rb") as file:
        _write(root + GUEST_PATH, file.read())
    _write(root + _HOSTS_PATH, _HOSTS.encode())
    hosts = f"{root}/etc/hosts"
    if os.path.isfile(hosts) and not os.path.islink(hosts):
        kernel.mount(root + _HOSTS_PATH, hosts, flags=MS_BIND)
        _seal(hosts)


def _mount_memory(target: str, mode: str, size_bytes: int, flags: int = 0, max_files: Optional[int] = None) -> None:
    options = f"mode={mode},size={size_bytes}"
    if max_files is not None:
        options += f",nr_inodes={max_files + 1}"  # the root directory is one
    kernel.mount("tmpfs", target, "tmpfs", flags | MS_NOSUID | MS_NODEV, options)


def _bind_read_only(source: str, target: str) -> None:
    """Binds the file system of `source` without the mounts below it."""
    try:
        kernel.mount(source, target, flags=MS_BIND)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # In a user namespace the kernel refuses to uncover files hidden by the mounts below: bind all of them or none.
        kernel.mount(source, target, flags=MS_BIND | MS_REC)
        for mounted in _mounts_below(target):
            _seal(mounted)
    _seal(target)


def _seal(target: str) -> None:
    """Makes one mount read-only and keeps its noexec, since a user namespace may not remove a flag."""
    kept = MS_NOEXEC if os.statvfs(target).f_flag & os.ST_NOEXEC else 0
    kernel.mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def _mounts_below(target: str) -> list[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        targets = [_unescaped(line.split(b" ")[4]) for line in file]
    return [mounted for mounted in targets if mounted.startswith(f"{target}/")]


def _unescaped(path: bytes) -> str:
    """Returns a path of mountinfo, in which the kernel writes blanks and backslashes as octal numbers."""
    return os.fsdecode(path.decode("unicode_escape").encode("latin-1"))


def _make_directory(root: str, name: str) -> str:
    target = f"{root}/{name.lstrip('/')}"
    os.makedirs(target, exist_ok=True)
    return target


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
