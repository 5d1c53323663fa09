"""Unpacks the environment of a sandbox in a machine of the cloud: as root, before the sandbox is there.

The archive is the daemon's own work. What is unpacked belongs to root, on the machine's disk, and the sandbox sees it
by a mount that is read-only.
"""

from __future__ import annotations

import os
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Environment:
    """The archive, and the version of the Python that it was made for."""

    __slots__ = ("archive", "version")

    def __init__(self, archive: str, version: tuple[int, ...]) -> None:
        self.archive = archive
        self.version = version

    @classmethod
    def of(cls, values: dict[str, Any]) -> Environment:
        return cls(str(values["archive"]), tuple(int(number) for number in values["version"]))

    @property
    def directory(self) -> str:
        """The directory that it is unpacked into."""
        return f"{self.archive}.unpacked"


def unpack(environment: Environment) -> None:
    """Unpacks it, again where an earlier attempt did not end. Raises OSError and ValueError."""
    if sys.version_info[: len(environment.version)] != environment.version:
        wanted = ".".join(map(str, environment.version))
        raise ValueError(f"its packages are for Python {wanted}, and this is {sys.version.split()[0]}")
    import tarfile

    if os.path.exists(environment.directory):
        shutil.rmtree(environment.directory)
    mask = os.umask(0o022)  # the sandbox's user reads it
    try:
        os.mkdir(environment.directory)
        with tarfile.open(environment.archive, "r:gz") as archive:
            # Not in the first releases of Python 3.9 to 3.11; the archive is ours in any case.
            options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(environment.directory, **options)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"its archive can't be read: {error}") from error
    finally:
        os.umask(mask)
