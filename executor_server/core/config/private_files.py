"""Files that only the daemon's user can read, written whole or not at all, and kept through a power failure."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file; its directory must be there. Raises OSError, and changes nothing then."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # with the rights 0600
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)  # the new entry too, and not only the content
    finally:
        os.close(directory)
