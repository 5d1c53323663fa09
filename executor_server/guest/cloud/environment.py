"""Unpacks the environment of a sandbox in a cloud machine: as root, before the sandbox exists.

The archive is the daemon's own work, and comes in parts. The unpacked files belong to root, on the machine's disk, and
the sandbox sees them through a read-only mount. Parts are read one after the other and removed when all is unpacked, so
a machine with little memory will do, and its disk has the packages once.
"""

from __future__ import annotations

import os
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO, Optional

_PIECE_BYTES = 65_536


class Environment:
    """The archive, its number of parts, and the version of Python it was made for."""

    __slots__ = ("archive", "parts", "version")

    def __init__(self, archive: str, parts: int, version: tuple[int, ...]) -> None:
        self.archive = archive
        self.parts = parts
        self.version = version

    @classmethod
    def of(cls, values: dict[str, Any]) -> Environment:
        version = tuple(int(number) for number in values["version"])
        return cls(str(values["archive"]), int(values["parts"]), version)

    @property
    def paths(self) -> list[str]:
        """The files of the parts, in their order."""
        return [f"{self.archive}.{number}" for number in range(self.parts)]

    @property
    def directory(self) -> str:
        """The directory that it is unpacked into."""
        return f"{self.archive}.unpacked"


def unpack(environment: Environment) -> None:
    """Unpacks the archive, from the start if an earlier attempt broke off. Raises OSError and ValueError."""
    if sys.version_info[: len(environment.version)] != environment.version:
        wanted = ".".join(map(str, environment.version))
        raise ValueError(f"its packages are for Python {wanted}, and this is {sys.version.split()[0]}")
    import gzip
    import tarfile
    import zlib

    if os.path.exists(environment.directory):
        shutil.rmtree(environment.directory)
    joined = _Joined(environment.paths)
    mask = os.umask(0o022)  # the sandbox's user reads it
    try:
        os.mkdir(environment.directory)
        with gzip.GzipFile(fileobj=joined) as content:  # type: ignore[call-overload]  # it only reads
            with tarfile.open(fileobj=content, mode="r|") as archive:
                # Not in the first releases of Python 3.9 to 3.11; the archive is ours in any case.
                options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                archive.extractall(environment.directory, **options)
            while content.read(_PIECE_BYTES):
                pass  # to the end of the stream, where its checksum is compared
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise ValueError(f"its archive can't be read: {error}") from error
    finally:
        os.umask(mask)
        joined.close()
    for path in environment.paths:
        os.unlink(path)


class _Joined:
    """Reads files one after the other, as if they were one."""

    def __init__(self, paths: list[str]) -> None:
        self._left = list(reversed(paths))
        self._file: Optional[BinaryIO] = None

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes, at most `size`; none at the end."""
        while True:
            if self._file is not None:
                data = self._file.read(size)
                if data:
                    return data
                self.close()
            if not self._left:
                return b""
            self._file = open(self._left.pop(), "rb")  # noqa: SIM115 - it stays open between reads

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
