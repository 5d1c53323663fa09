"""Packs the guest into one file that any CPython from 3.9 on can run: `python -I -S -c BOOT CONFIG READY_FD`.

The archive holds the package `executor_guest` (our `guest/`) and the value codec under its own name: the sources, and
ahead of them their bytecode for the interpreter that the daemon runs on (guest/bytecode.py), because a sandbox starts
in a few milliseconds and compiling the guest would cost more than the rest together; another interpreter ignores it and
compiles the sources. The same sources always give the same file name, so that an archive is written once and never
changed under a sandbox that has it mounted. A separate process compiles them, because no module of the daemon may.

Compiling takes 0.5 s of CPU for each new state directory. So the bytes are also kept in the user's cache directory,
under a name made from the sources and the packing code. The cache holds code that sandboxes run and that the daemon
checks in no other way, so it is read only if no other user can have written it: the directory and the file must belong
to the daemon's user, and only this user may write to them. Bytes that do not match the digest stored with them, as
after a crash of the machine, are packed again. Whatever the reason, a cache that can't be used costs 0.5 s and nothing
else.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import secrets
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import executor_api
import executor_server
from executor_server.guest.wire.paths import BYTECODE, GUEST_PATH, import_program

_VERSION_CHARS = 16
# Archives in the cache: one for each version of this software and of Python that this user uses.
_KEPT_ARCHIVES = 8
_MAX_KEPT_BYTES = 2**26
# Seconds to compile an archive's sources, on a busy machine.
_COMPILE_TIME_S = 60.0
_COMPILER = Path(executor_server.__file__).parent / "guest" / "bytecode.py"
_API = ("__init__.py", "displays.py", "limits.py", "strict_json.py", "tar.py")
# The oldest date a zip can hold.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)

_MAIN = f"""\
{import_program("sys.path[0]")}
name, arguments = sys.argv[1], sys.argv[2:]
if name == "namespaces":
    from executor_guest.cloud.namespaces import main
elif name == "relay":
    from executor_guest.cloud.relay import main
elif name == "egress":
    from executor_guest.cloud.egress import main
else:
    raise SystemExit(f"there is no command {{name}}")
sys.exit(main(arguments))
"""
"""The archive as a program that root runs in a machine of the cloud, around a sandbox."""


@dataclass(frozen=True)
class GuestArchive:
    path: Path
    version: str  # changes with any byte of the guest


def pack_guest(directory: Path, *, with_proxy: bool = False) -> GuestArchive:
    """Writes the archive into `directory`, unless it is there already, and returns it.

    `with_proxy`: includes the egress proxy, for machines in which it runs next to the sandbox.
    """
    return pack_archive(_guest_sources(with_proxy=with_proxy), directory, default_cache_dir())


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The directory that keeps packed archives; None where this user has no cache directory."""
    cache_home = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        cache_home = cache_home.expanduser()
    except RuntimeError:  # a user without a home
        return None
    return cache_home / "remote-executor" / "guests" if cache_home.is_absolute() else None


def pack_archive(sources: Mapping[str, bytes], directory: Path, cache_dir: Path | None = None) -> GuestArchive:
    """Packs modules, given by their names inside the archive; takes them from the cache when it has them."""
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name in sorted(sources):
        digest.update(b"%d %s %d " % (len(name), name.encode(), len(sources[name])) + sources[name])
    version = digest.hexdigest()[:_VERSION_CHARS]
    path = directory / f"guest-{version}.pyz"
    if not path.exists():
        _write_atomically(path, _zipped(sources) if cache_dir is None else _cached(sources, version, cache_dir))
    return GuestArchive(path, version)


def _guest_sources(*, with_proxy: bool) -> dict[str, bytes]:
    guest = Path(executor_server.__file__).parent / "guest"
    api = Path(executor_api.__file__).parent
    sources = {
        "__main__.py": _MAIN.encode(),
        **{f"executor_api/{name}": (api / name).read_bytes() for name in _API},
    }
    packages = [(guest, "executor_guest"), (api / "values", "executor_api/values")]
    if with_proxy:
        found = importlib.util.find_spec("h11")
        assert found is not None and found.origin is not None, "h11 is a dependency of the daemon"
        packages.append((Path(found.origin).parent, "h11"))
    for root, package in packages:
        for module in root.rglob("*.py"):
            if with_proxy or module.parent != guest / "egress":
                sources[f"{package}/{module.relative_to(root).as_posix()}"] = module.read_bytes()
    return sources


def _cached(sources: Mapping[str, bytes], version: str, cache_dir: Path) -> bytes:
    """The archive's bytes from the cache; packs and keeps them when they are not there or can't be trusted."""
    # The bytes also depend on this file and on the compiler.
    packing = hashlib.sha256(Path(__file__).read_bytes() + _COMPILER.read_bytes()).hexdigest()
    name = f"{version}-{packing[:_VERSION_CHARS]}"
    try:
        kept = _read_kept(cache_dir, name)
    except OSError:  # another user's, no directory, a link: as good as none
        kept = None
    if kept is not None:
        return kept
    packed = _zipped(sources)
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _keep(cache_dir, name, hashlib.sha256(packed).digest() + packed)
    except OSError:  # a full disk, a home that is read-only: the next start packs again
        pass
    return packed


def _keep(cache_dir: Path, name: str, data: bytes) -> None:
    """Writes a file into the cache and drops the oldest ones, where no other user could have made the directory.

    A link, or another user's directory, would let that user choose where this daemon writes and deletes. Everything is
    done below the checked descriptor, so renaming directories meanwhile changes nothing.
    """
    directory = _open_directory(cache_dir)
    try:
        if _is_only_ours(os.fstat(directory)):
            ours = Path(f"/proc/self/fd/{directory}")
            _write_atomically(ours / name, data)
            _drop_oldest(ours)
    finally:
        os.close(directory)


def _open_directory(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _read_kept(cache_dir: Path, name: str) -> bytes | None:
    """The bytes kept under the name; None when there are none, or when another user could have written them.

    The directory is opened first and the file below its descriptor, so that the file that is read is the checked
    one, even if another user renames directories meanwhile.
    """
    try:
        directory = _open_directory(cache_dir)
    except FileNotFoundError:
        return None
    try:
        # O_NONBLOCK: a named pipe in the file's place must not hold the daemon's start.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
            found = os.fstat(file.fileno())
            if not (stat.S_ISREG(found.st_mode) and _is_only_ours(os.fstat(directory)) and _is_only_ours(found)):
                return None
            digest, data = file.read(hashlib.sha256().digest_size), file.read(_MAX_KEPT_BYTES)
    except FileNotFoundError:
        return None
    finally:
        os.close(directory)
    return data if hashlib.sha256(data).digest() == digest else None


def _is_only_ours(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _drop_oldest(cache_dir: Path) -> None:
    """Keeps the newest archives; those of older versions of this software are useless."""
    kept = sorted(cache_dir.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in kept[_KEPT_ARCHIVES:]:
        path.unlink(missing_ok=True)


def _zipped(sources: Mapping[str, bytes]) -> bytes:
    """Stored, not deflated: the interpreter would import zlib to read it, and that costs more than it saves."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_entry(BYTECODE), _bytecode(sources))  # first, at a known place
        for name in sorted(sources):
            archive.writestr(_entry(name), sources[name])
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _TIMESTAMP)
    info.create_system = 3  # Unix, whatever made it
    info.external_attr = 0o100644 << 16
    return info


def _bytecode(sources: Mapping[str, bytes]) -> bytes:
    compiled = subprocess.run(
        [sys.executable, "-I", "-S", _COMPILER, GUEST_PATH],
        input=json.dumps({name: source.decode() for name, source in sources.items()}).encode(),
        stdout=subprocess.PIPE,
        timeout=_COMPILE_TIME_S,
        check=True,
    )
    return compiled.stdout


def _write_atomically(path: Path, data: bytes) -> None:
    """A daemon that dies midway leaves no half archive under the final name. Readable by the sandbox's own user.

    Several backends of one daemon may write the same one at the same time.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
