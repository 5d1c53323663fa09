"""Archives in which environments travel to machines of the cloud: made once for each environment, and kept.

The same environment always gives the same bytes. A machine unpacks them as root (guest/cloud/environment.py), with the
times of the files, by which Python knows that their bytecode is current.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import re
import secrets
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.environments import Environment
from executor_server.core import SandboxFailure, SpecUnsupported

# Files of the directory: archives of the environments that were used last.
_KEPT_ARCHIVES = 8
# Smaller ones take longer to make than they save on the way.
_COMPRESSION = 6
_MIB = 2**20
_ID = re.compile(r"env-[A-Za-z0-9._-]{1,128}")


class _TooLarge(Exception):
    """The archive has more bytes than it may."""


@dataclass(frozen=True)
class PackedEnvironment:
    environment_id: str
    data: bytes


class Archives:
    """Makes archives of `max_bytes` at most, one at a time, and keeps them in a directory."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._too_large: set[str] = set()
        self._packing = asyncio.Lock()

    async def packed(self, environment: Environment) -> PackedEnvironment:
        """Returns the archive. Raises SpecUnsupported when it is too large, SandboxFailure when it can't be made."""
        if not _ID.fullmatch(environment.environment_id):
            raise SandboxFailure(f"{environment.environment_id!r} is not the id of an environment")
        async with self._packing:
            try:
                if environment.environment_id not in self._too_large:
                    return PackedEnvironment(
                        environment.environment_id, await asyncio.to_thread(self._kept_or_made, environment)
                    )
            except _TooLarge:
                self._too_large.add(environment.environment_id)
            except OSError as error:
                raise SandboxFailure(f"no archive of {environment.environment_id}: {error}") from error
        raise SpecUnsupported(
            f"these packages are more than {self._max_bytes / _MIB:,.0f} MiB as an archive, and a machine of E2B gets "
            "no more: ask for fewer, use an image that has them, or let the operator raise "
            "environments.max_archive_bytes"
        )

    def _kept_or_made(self, environment: Environment) -> bytes:
        path = self._directory / f"{environment.environment_id}.tar.gz"
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            data = pack(environment.directory, self._max_bytes)
            self._keep(path, data)
        if len(data) > self._max_bytes:
            raise _TooLarge
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        kept = sorted(self._directory.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in kept[_KEPT_ARCHIVES:]:
            old.unlink()


def pack(directory: Path, max_bytes: int) -> bytes:
    """Returns the environment as a compressed archive. Raises OSError; `_TooLarge` as soon as it has too many bytes."""
    written = _Bounded(max_bytes)
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=written, mtime=0) as compressed,
        tarfile.open(mode="w", fileobj=compressed, format=tarfile.GNU_FORMAT) as archive,
    ):
        for path in _below(directory / "site"):
            _add(archive, path, str(path.relative_to(directory)))
    return written.getvalue()


class _Bounded(io.BytesIO):
    """Memory that refuses more than so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: object) -> int:
        count = super().write(data)  # type: ignore[arg-type]
        if self.tell() > self._max_bytes:
            raise _TooLarge
        return count


def _below(directory: Path) -> Iterator[Path]:
    """Yields the directory and all below it; each directory comes before what is in it."""
    yield directory
    with os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path))
        else:
            yield Path(entry.path)


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Adds one entry, as root's. Each name of a file with several is a file of its own."""
    status = path.lstat()
    member = tarfile.TarInfo(name)
    member.mtime = int(status.st_mtime)
    if stat.S_ISDIR(status.st_mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)
    elif stat.S_ISLNK(status.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        archive.addfile(member)
    elif stat.S_ISREG(status.st_mode):
        member.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
        member.size = status.st_size
        with path.open("rb") as file:
            archive.addfile(member, file)
    else:
        raise OSError(f"{name} is neither a file nor a directory")
