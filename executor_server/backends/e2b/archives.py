"""Archives in which environments travel to machines of the cloud: made once for each environment, and kept.

One of 128 MiB takes several seconds to make. That happens in the background; until then, a request is answered as if
its environment were still being made. No archive is in memory as a whole: it is written to a file, and read part by
part.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from executor_server.backends.e2b.packing import TooLarge, Walk, pack
from executor_server.backends.environments import Environment
from executor_server.core import ImageNotReady, Progress, SandboxFailure, SpecUnsupported

PART_BYTES = 8 * 2**20
"""Bytes of one part of an upload. A request keeps its part in memory, because it is repeated if it fails."""
# Files of the directory: archives of the environments that were used last.
_KEPT_ARCHIVES = 8
# Seconds that a request waits for an archive: a small one is ready by then.
_ANSWER_WAIT_S = 0.5
_RETRY_S = 1.0
_MIB = 2**20
_UPLOADED_BYTES_S = 2**20  # a second, at least
_UNPACKED_BYTES_S = 2 * 2**20
_UNPACKING_BEGINS_S = 30.0
_ID = re.compile(r"env-[A-Za-z0-9._-]{1,128}")


def upload_s(size_bytes: int) -> float:
    """Returns the additional seconds that uploading this number of bytes may take."""
    return size_bytes / _UPLOADED_BYTES_S


def unpack_s(size_bytes: int) -> float:
    """Returns the additional seconds that unpacking an archive of this size may take."""
    return _UNPACKING_BEGINS_S + size_bytes / _UNPACKED_BYTES_S


class PackedEnvironment:
    """An open archive: it can be read to its end even if it is dropped meanwhile. The user must close it."""

    def __init__(self, environment_id: str, fd: int) -> None:
        """Takes the descriptor."""
        self.environment_id = environment_id
        self.size_bytes = os.fstat(fd).st_size
        self.parts = -(-self.size_bytes // PART_BYTES)
        self._fd = fd

    def part(self, number: int) -> bytes:
        """Returns one of the `parts`, which together are the archive. Blocks. Raises OSError."""
        return os.pread(self._fd, PART_BYTES, number * PART_BYTES)

    def __enter__(self) -> PackedEnvironment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._fd)


@dataclass(frozen=True)
class _Packing:
    task: asyncio.Task[None]
    walk: Walk


class Archives:
    """Makes archives of `max_bytes` at most, one at a time, and keeps them in a directory."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._too_large: set[str] = set()
        self._packings: dict[str, _Packing] = {}
        self._one_at_a_time = asyncio.Lock()

    async def packed(self, environment: Environment) -> PackedEnvironment:
        """Returns the archive.

        If it is missing, it is made in the background, and ImageNotReady is raised with progress and a retry time.
        Raises SpecUnsupported when it is too large, SandboxFailure when it can't be made.
        """
        environment_id = environment.environment_id
        if not _ID.fullmatch(environment_id):
            raise SandboxFailure(f"{environment_id!r} is not the id of an environment")
        try:
            if environment_id not in self._too_large:
                return self._kept(environment_id) or await self._made(environment)
        except TooLarge:
            self._too_large.add(environment_id)
        except OSError as error:
            raise SandboxFailure(f"no archive of {environment_id}: {error}") from error
        raise SpecUnsupported(
            f"these packages are more than {self._max_bytes / _MIB:,.0f} MiB as an archive, and a machine of E2B gets "
            "no more: ask for fewer, use an image that has them, or let the operator raise "
            "environments.max_archive_bytes"
        )

    async def close(self) -> None:
        """Ends the packings that run, and waits for them. Idempotent."""
        for packing in self._packings.values():
            packing.walk.is_stopped = True
        await asyncio.gather(*(packing.task for packing in self._packings.values()), return_exceptions=True)

    # -- one archive -------------------------------------------------------------------------------------------------

    async def _made(self, environment: Environment) -> PackedEnvironment:
        environment_id = environment.environment_id
        packing = self._packings.get(environment_id)
        if packing is None:
            packing = self._packings[environment_id] = self._begin(environment)
        await asyncio.wait({packing.task}, timeout=_ANSWER_WAIT_S)
        if not packing.task.done():
            progress = Progress("packing", packing.walk.done, packing.walk.total, "files")
            text = f"the packages are being packed for a machine of E2B: {progress}"
            raise ImageNotReady(text, retry_after_s=_RETRY_S, progress=progress)
        self._packings.pop(environment_id, None)  # a failure is reported once
        packing.task.result()
        made = self._kept(environment_id)
        if made is None:
            raise SandboxFailure(f"the archive of {environment_id} was removed at once")
        return made

    def _begin(self, environment: Environment) -> _Packing:
        walk = Walk()

        async def run() -> None:
            async with self._one_at_a_time:
                await asyncio.to_thread(self._make, environment, walk)
            self._packings.pop(environment.environment_id, None)

        task = asyncio.create_task(run(), name=f"archive of {environment.environment_id}")
        task.add_done_callback(_mark_as_seen)
        return _Packing(task, walk)

    def _kept(self, environment_id: str) -> PackedEnvironment | None:
        """Returns the archive when there is one. Raises OSError, TooLarge."""
        path = self._path(environment_id)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        packed = PackedEnvironment(environment_id, fd)
        with contextlib.ExitStack() as on_failure:
            on_failure.push(packed)
            if packed.size_bytes > self._max_bytes:
                raise TooLarge
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
            on_failure.pop_all()
        return packed

    def _make(self, environment: Environment, walk: Walk) -> None:
        """Blocks. Raises OSError, TooLarge, Stopped."""
        path = self._path(environment.environment_id)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for left_over in self._directory.glob(".*"):  # by a daemon that was killed: only one is made at a time
            left_over.unlink()
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("wb") as file:
                pack(environment.directory, file, self._max_bytes, walk)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        kept = sorted(self._directory.iterdir(), key=lambda each: each.stat().st_mtime, reverse=True)
        for old in kept[_KEPT_ARCHIVES:]:
            old.unlink()

    def _path(self, environment_id: str) -> Path:
        return self._directory / f"{environment_id}.tar.gz"


def _mark_as_seen(task: asyncio.Task[None]) -> None:
    """Keeps a failure from being logged as lost: the next request for the archive raises it."""
    if not task.cancelled():
        task.exception()
