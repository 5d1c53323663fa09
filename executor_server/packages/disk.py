"""The directories of environments, and how directories are measured, removed, and walked in threads."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

MAX_DEPTH = 128
"""Depth to which trees are measured. A deeper tree counts as endless."""

_BLOCK_BYTES = 512  # the unit of st_blocks

_log = structlog.get_logger(__name__)

T = TypeVar("T")


class Places:
    """The directories below the root, all on one file system, so that things move between them by rename.

    Only the daemon's user can enter the root, so no other user of the host can reach them. Inside a sandbox, one of
    them is a separate mount, which the sandbox's user can enter.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ready = root / "ready"
        """The environments: complete, checked, never changed."""
        self.staging = root / "staging"
        """Directories that are being built or removed. Emptied at the daemon's start."""
        self.damaged = root / "damaged"
        """Damaged environments. Each is removed when no sandbox has it."""
        self.work = root / "work"
        """A writable directory for each build sandbox that runs uv. Emptied at the daemon's start."""
        self.programs = root / "programs"
        """The read-only directory of build sandboxes: uv, and the wheels."""
        self.wheels = self.programs / "wheels"
        """The downloaded wheel files (wheels.py)."""
        self.holds = root / "holds"
        """A file for each sandbox that has an environment."""
        self.index = root / "index.db"
        """The requests with their locks, and the last uses."""


class Stopped(Exception):
    """The walk was stopped."""


@dataclass
class Walk:
    """A walk in a thread, which the event loop can stop."""

    is_stopped: bool = False

    def step(self) -> None:
        """Raises Stopped."""
        if self.is_stopped:
            raise Stopped


async def to_its_end(walk: Walk, function: Callable[[], T]) -> T:
    """Runs a function in a thread. If the caller is cancelled, stops the walk and waits for the thread."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        walk.is_stopped = True
        await asyncio.gather(running, return_exceptions=True)
        raise


@dataclass(frozen=True)
class Volume:
    """Files and directories, and their bytes on disk. A file with two names counts half for each."""

    entries: float = 0
    size_bytes: float = 0

    def fits(self, limit: Volume) -> bool:
        return self.entries <= limit.entries and self.size_bytes <= limit.size_bytes


def volume_of(top: Path) -> Volume:
    """Measures a directory, which may change meanwhile. Follows no link. Blocks."""
    entries = size_bytes = 0.0
    for path, directories, files, fd in os.fwalk(top) if top.is_dir() else ():
        entries += len(directories)
        if path.count("/") - str(top).count("/") >= MAX_DEPTH and directories:
            directories.clear()
            entries = float("inf")
        for name in files:
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                entries += 1 / max(found.st_nlink, 1)
                size_bytes += found.st_blocks * _BLOCK_BYTES / max(found.st_nlink, 1)
    return Volume(entries, size_bytes)


def remove(path: Path) -> None:
    """Removes a directory with its content. Follows no link. Blocks. Logs a failure."""
    if not os.path.lexists(path):
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):  # it changes meanwhile, or is deeper than there are descriptors
        subprocess.run(["rm", "-rf", "--", path], check=False, capture_output=True)
    if os.path.lexists(path):
        _log.error("environment_files_left_over", path=str(path))
