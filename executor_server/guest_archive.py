"""Packs the guest into one file that any CPython from 3.9 on can run: `python -I -S -c BOOT CONFIG READY_FD`.

The archive holds the package `executor_guest` (our `guest/`) and the value codec under its own name.
Beside each source lies its bytecode for the interpreter that the daemon runs on, because a sandbox starts in a few
milliseconds and compiling the guest would cost more than the rest together; another interpreter ignores it and compiles
the source. The same sources always give the same bytes, and the file is named by them, so that an archive is written
once and never changed under a sandbox that has it mounted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import py_compile
import secrets
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import executor_api
import executor_server
from executor_server.guest.place import GUEST_BOOT, GUEST_PATH

__all__ = ["GUEST_BOOT", "GUEST_PATH", "GuestArchive", "pack_archive", "pack_guest"]

_VERSION_CHARS = 16
# The oldest date a zip can hold. Bytecode is not checked against it (see _bytecode), so it can be the same for all.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)

_MAIN = """\
import sys
name, arguments = sys.argv[1], sys.argv[2:]
if name == "nest":
    from executor_guest.nest import main
elif name == "relay":
    from executor_guest.relay import main
else:
    raise SystemExit(f"there is no command {name}")
sys.exit(main(arguments))
"""
"""The archive as a program: what root runs in a machine of the cloud, around and beside a sandbox."""


@dataclass(frozen=True)
class GuestArchive:
    path: Path
    version: str  # changes with any byte of the guest


def pack_guest(directory: Path) -> GuestArchive:
    """Writes the archive into `directory`, unless it is there already, and returns it."""
    return pack_archive(_guest_sources(), directory)


def pack_archive(sources: Mapping[str, bytes], directory: Path) -> GuestArchive:
    """Packs modules, given by their names inside the archive."""
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER)
    for name in sorted(sources):
        digest.update(b"%d %s %d " % (len(name), name.encode(), len(sources[name])) + sources[name])
    version = digest.hexdigest()[:_VERSION_CHARS]
    path = directory / f"guest-{version}.pyz"
    if not path.exists():
        _write_atomically(path, _zipped(sources))
    return GuestArchive(path, version)


def _guest_sources() -> dict[str, bytes]:
    guest = Path(executor_server.__file__).parent / "guest"
    api = Path(executor_api.__file__).parent
    sources = {
        "__main__.py": _MAIN.encode(),
        **{f"executor_api/{name}": (api / name).read_bytes() for name in ("__init__.py", "limits.py")},
    }
    for root, package in ((guest, "executor_guest"), (api / "values", "executor_api/values")):
        for module in root.rglob("*.py"):
            sources[f"{package}/{module.relative_to(root).as_posix()}"] = module.read_bytes()
    return sources


def _zipped(sources: Mapping[str, bytes]) -> bytes:
    """Stored, not deflated: the interpreter would import zlib to read it, and that costs more than it saves."""
    buffer = io.BytesIO()
    with (
        tempfile.TemporaryDirectory(prefix="executor-guest-") as scratch,
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name in sorted(sources):
            archive.writestr(_entry(name), sources[name])
            archive.writestr(_entry(f"{name}c"), _bytecode(name, sources[name], Path(scratch)))
    return buffer.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _TIMESTAMP)
    info.create_system = 3  # Unix, whatever made it
    info.external_attr = 0o100644 << 16
    return info


def _bytecode(name: str, source: bytes, scratch: Path) -> bytes:
    """Unchecked-hash bytecode: zipimport then takes it without comparing times or reading the source."""
    source_path, bytecode_path = scratch / "module.py", scratch / "module.pyc"
    source_path.write_bytes(source)
    py_compile.compile(
        str(source_path),
        str(bytecode_path),
        dfile=f"{GUEST_PATH}/{name}",
        doraise=True,
        optimize=0,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    return bytecode_path.read_bytes()


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
