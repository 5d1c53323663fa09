"""The files, mounts and environment of a sandbox, as arguments of bwrap.

Nothing is visible inside unless a line here makes it so. A sandbox sees the libraries and the data of the host's system
and a few tools (system.py), a few files of /etc that libraries expect (in a tree of our own, so that one mount brings
them all), the Python environment of its image and the guest; all read-only. It can write to /workspace, /tmp, which is
also /var/tmp, and /dev/shm, each a file system in memory of limited size.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.environments import Mount
from executor_server.backends.guest_archive import GuestArchive
from executor_server.backends.local.images import Image
from executor_server.backends.local.system import SHOWN_DIRECTORIES, publish
from executor_server.backends.settings import (
    CA_BUNDLE,
    HOSTNAME,
    HOSTS,
    VAR_TMP,
    WORKSPACE,
    egress_environment,
    sandbox_environment,
    shm_bytes,
)
from executor_server.core import SandboxSpec
from executor_server.guest.wire.paths import GUEST_PATH

SANDBOX_ID = 1000
"""User and group of the code inside."""

Entry = tuple[str, ...]
"""A part of the file system: ("dir", path), ("link", target, path) or ("bind", source, path), which is read-only."""

_HOME = Path("/home/user")
"""Another name of the workspace, which programs written for other sandboxes use."""
_HASH_CHARS = 16
_NOLOGIN = "/usr/sbin/nologin"
# Below /usr/lib, which every sandbox sees anyway.
_OS_RELEASE = Path("/usr/lib/os-release")
_UNKNOWN_OS = b"NAME=Linux\nID=linux\nPRETTY_NAME=Linux\n"
_OWN_ETC = {
    "passwd": f"root:x:0:0:root:/:{_NOLOGIN}\nsandbox:x:{SANDBOX_ID}:{SANDBOX_ID}::{WORKSPACE}:/bin/sh\n"
    f"nobody:x:65534:65534::/:{_NOLOGIN}\n",
    "group": f"root:x:0:\nsandbox:x:{SANDBOX_ID}:\nnogroup:x:65534:\n",
    "hostname": f"{HOSTNAME}\n",
    "hosts": HOSTS,
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# Files that libraries read: the linker's, time zones, certificates. Directories: targets of links in /usr/bin, fonts.
_COPIED_ETC = ("ld.so.cache", "localtime", "mime.types", "ssl/certs/ca-certificates.crt")
_MOUNTED_ETC = ("alternatives", "fonts")


def build_etc(directory: Path, ca_bundle: bytes | None = None) -> Path:
    """Makes the /etc of all sandboxes: our own files, copies of some of the host's, and mount points for others.

    `ca_bundle` are the certificate authorities of sandboxes with a network.

    Its name is a hash of its content, and an existing one is never changed: sandboxes may have it mounted.
    """
    files = {name: text.encode() for name, text in _OWN_ETC.items()}
    files["os-release"] = _OS_RELEASE.read_bytes() if _OS_RELEASE.is_file() else _UNKNOWN_OS
    files |= {name: Path("/etc", name).read_bytes() for name in _COPIED_ETC if Path("/etc", name).is_file()}
    if ca_bundle is not None:
        files[str(Path(CA_BUNDLE).relative_to("/etc"))] = ca_bundle
    mounted = [name for name in _MOUNTED_ETC if Path("/etc", name).is_dir()]
    digest = hashlib.sha256(repr((sorted(files.items()), mounted)).encode()).hexdigest()[:_HASH_CHARS]
    etc = directory / f"etc-{digest}"
    if not etc.exists():
        with tempfile.TemporaryDirectory(prefix=".etc-", dir=directory) as scratch:
            _write_etc(Path(scratch, "etc"), files, mounted)
            publish(Path(scratch, "etc"), etc)
    return etc


def _write_etc(etc: Path, files: Mapping[str, bytes], mounted: Sequence[str]) -> None:
    for name in mounted:
        (etc / name).mkdir(parents=True)
    for name, data in files.items():
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_bytes(data)
    for path in (etc, *etc.rglob("*")):  # the daemon's umask must not hide them from the sandbox's user
        path.chmod(0o755 if path.is_dir() else 0o644)
    (etc / "mtab").symlink_to("/proc/mounts")


@dataclass(frozen=True)
class Layout:
    """The parts of the file system that all sandboxes of one daemon have in common."""

    etc: Path
    tools: Path
    guest: GuestArchive

    def arguments(self, image: Image, spec: SandboxSpec, mounts: Sequence[Mount] = ()) -> list[str]:
        """Arguments of bwrap for namespaces, environment and mounts; not the command."""
        return [*_namespaces(), *_variables(image, spec), *self._mounts(image, spec, mounts)]

    def fork_server_root(self, image: Image) -> list[Entry]:
        """Returns the read-only files of the image's sandboxes, for a fork server; its sandboxes add their own."""
        return [*self._system(), *self._image(image)]

    def _mounts(self, image: Image, spec: SandboxSpec, mounts: Sequence[Mount]) -> Iterator[str]:
        yield from _as_arguments(self._system())
        # The devices that ordinary programs open, and terminals of its own (devpts): no /dev/fuse, no hardware.
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from _writable("/dev/shm", shm_bytes(spec.disk_bytes, spec.memory_bytes))
        yield from _writable("/tmp", spec.disk_bytes)
        yield from _writable(WORKSPACE, spec.disk_bytes)
        yield from _as_arguments(self._image(image))  # after /tmp: an environment may live there
        for mount in mounts:  # bwrap makes all mounts nosuid and, but for --dev-bind, nodev
            yield from ("--ro-bind" if mount.read_only else "--bind", str(mount.source), mount.target)
        # Last, since bwrap could make no mount point after it. Neither reaches the mounts below them.
        yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE)

    def _system(self) -> Iterator[Entry]:
        for directory in SHOWN_DIRECTORIES:
            if directory.is_symlink():  # /lib -> usr/lib
                yield ("link", str(directory.readlink()), str(directory))
            elif directory.is_dir():
                yield from _parents(directory)
                yield ("bind", str(directory), str(directory))
        yield ("bind", str(self.tools), "/usr/bin")
        yield ("link", "usr/bin", "/bin")
        yield ("link", "usr/bin", "/sbin")  # where the standard library looks for ldconfig
        yield from _parents(Path(VAR_TMP))
        yield ("link", "../tmp", VAR_TMP)  # relative: bubblewrap, too, goes through it
        yield ("bind", str(self.etc), "/etc")
        for name in _MOUNTED_ETC:
            if (self.etc / name).is_dir():
                yield ("bind", f"/etc/{name}", f"/etc/{name}")

    def _image(self, image: Image) -> Iterator[Entry]:
        yield from _parents(*image.directories, *(link for link, _ in image.links), Path(GUEST_PATH))
        for directory in image.directories:
            yield ("bind", str(directory), str(directory))
        for link, target in image.links:
            yield ("link", target, str(link))
        if not any(path.is_relative_to(_HOME) for path in (*image.directories, *(link for link, _ in image.links))):
            yield from _parents(_HOME)
            yield ("link", f"../{WORKSPACE.lstrip('/')}", str(_HOME))
        yield ("bind", str(self.guest.path), GUEST_PATH)


def _parents(*paths: Path) -> Iterator[Entry]:
    """Makes the parent directories: bubblewrap would make them for root alone, and the sandbox's user is not root."""
    directories = {parent for path in paths for parent in path.parents}
    for directory in sorted(directories - {Path("/")}):
        yield ("dir", str(directory))


def _as_arguments(entries: Iterable[Entry]) -> Iterator[str]:
    for entry in entries:
        if entry[0] == "dir":
            yield from ("--perms", "0755", "--dir", entry[1])
        else:
            yield from ("--symlink" if entry[0] == "link" else "--ro-bind", *entry[1:])


def _namespaces() -> Iterator[str]:
    # No --die-with-parent: a sandbox outlives the daemon, and its supervisor ends it when no daemon connects again.
    yield from ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
    yield from ("--as-pid-1", "--new-session", "--hostname", HOSTNAME)


def environment_of(image: Image, spec: SandboxSpec) -> dict[str, str]:
    """Returns all environment variables of a sandbox but PWD, which bwrap sets with --chdir."""
    path = f"{image.python.parent}:/usr/local/bin:/usr/bin:/bin"
    egress = egress_environment() if spec.egress else {}
    return {"PATH": path, **sandbox_environment(spec.processes), **egress}


def _variables(image: Image, spec: SandboxSpec) -> Iterator[str]:
    yield "--clearenv"
    for name, value in environment_of(image, spec).items():
        yield from ("--setenv", name, value)


def _writable(path: str, size_bytes: int) -> Iterator[str]:
    """Mounts a private file system in memory. Its mode is that of /tmp: it is mounted before its user is known."""
    yield from ("--perms", "1777", "--size", str(size_bytes), "--tmpfs", path)
