"""What a sandbox gets of the processors where more than one wants them: the weight of its control group.

A whole share is what the kernel gives to a group that nobody has weighed, so a sandbox is worth no less than before
beside whatever else this host runs; only those that divide a share are.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

# By version of control groups: the file, the weight of a whole share, the least that the kernel takes.
_FILES = {1: ("cpu.shares", 1024, 2), 2: ("cpu.weight", 100, 1)}


def set_cpu_share(directory: Path, version: int, share: float) -> None:
    """Weighs the group, as far as this is possible: when it is gone, or not ours to weigh, nothing depends on it."""
    name, whole, least = _FILES[version]
    with contextlib.suppress(OSError):
        # Not made where it is not: what is no control group gets no file.
        fd = os.open(directory / name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, str(max(least, round(whole * share))).encode())
        finally:
            os.close(fd)
