"""Runs uv in build sandboxes, limits how much it writes, and turns its end into a result or an error for the client."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from executor_server.backends import BuildMounts, BuildSandboxes
from executor_server.core import EgressDenial, EnvironmentFailed, ImageNotReady, NetworkRules, Progress, SandboxSpec
from executor_server.guest.egress import reasons
from executor_server.guest.wire.paths import WORK_PATH
from executor_server.network.egress import Egress
from executor_server.packages import tree
from executor_server.packages.build_sandbox import (
    BuildSandbox,
    BuildTimeout,
    Network,
    Order,
    open_build_sandbox,
    program,
)
from executor_server.packages.disk import Places, Volume, Walk, remove, to_its_end, volume_of
from executor_server.packages.uv import ForeignPython, Listener, Uv, environment, find_uv, place_uv

MIB = 2**20
RETRY_S = 30.0
"""Seconds until the next attempt at a build that failed because of the index."""
_MEMORY_BYTES = 2048 * MIB
_DISK_BYTES = 1024 * MIB
_PROCESSES = 256
_ORPHAN_TIME_S = 60.0
_WATCH_INTERVAL_S = 0.1
_WATCH_PAUSES = 5  # times as long as measuring takes
# Concurrent connections of uv, and those per minute: it reads pages and files of many packages at once, from two hosts.
# uv retries refused connections, which costs seconds.
_MAX_CONNECTIONS = 256
_MAX_NEW_CONNECTIONS_PER_MINUTE = 6000
# uv's own cache has some files in addition to those of an environment.
_VOLUME_FACTOR = 1.25

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class BuildSlot:
    """Where the environments for a target are built."""

    maker: BuildSandboxes
    image: str  # of the build sandboxes
    foreign: ForeignPython | None = None  # the target's Python, if it is not that of the image


@dataclass(frozen=True)
class BuildSettings:
    """The administrator's settings for builds."""

    index_url: str
    network: NetworkRules  # hosts of the index, and the secrets that it asks for
    build_timeout_s: float
    uv: Path | None = None  # None: the daemon's own
    max_entries: int = tree.MAX_ENTRIES
    first_import_time_s: float = 60.0  # modules that are not imported within it get no bytecode


@dataclass(frozen=True)
class Python:
    """The Python of a build sandbox, as it describes itself."""

    version: str  # "3.12", "3.13t"
    platform: str  # "x86_64-manylinux_2_36"
    executable: str

    @property
    def interpreter(self) -> str:
        """The name of its kind in a lock."""
        return f"cpython-{self.version}"


@dataclass(frozen=True)
class UvTask:
    """A command of uv, or files to download into the build sandbox's directory."""

    command: Sequence[str]
    text: str = ""  # its input
    output: str | None = None  # path of its output in the build sandbox
    files: Sequence[tuple[str, str]] = ()  # addresses, and the names of the files


class UvSandboxes:
    """Creates build sandboxes for uv."""

    def __init__(self, places: Places, settings: BuildSettings, egress: Egress) -> None:
        self._places = places
        self._settings = settings
        self._network = Network(
            egress,
            replace(
                settings.network,
                max_connections=_MAX_CONNECTIONS,
                max_new_connections_per_minute=_MAX_NEW_CONNECTIONS_PER_MINUTE,
            ),
        )
        self._uv: Uv | None = None
        self._placing = asyncio.Lock()

    async def placed(self) -> Uv:
        """Finds uv, and copies it for build sandboxes. Raises UvMissing, OSError."""
        async with self._placing:
            if self._uv is None:
                found = await asyncio.to_thread(find_uv, self._settings.uv)
                await asyncio.to_thread(place_uv, found, self._places.programs)
                self._uv = found
            return self._uv

    @asynccontextmanager
    async def directory(self) -> AsyncIterator[Path]:
        """Creates a directory for one build sandbox to write to; removes it at the end of the block. Raises OSError."""
        work = self._places.work / secrets.token_hex(8)
        work.mkdir(mode=0o700)
        try:
            yield work
        finally:
            await to_its_end(Walk(), lambda: remove(work))

    @asynccontextmanager
    async def open(
        self, slot: BuildSlot, work: Path, max_environment_bytes: int, *, egress: bool
    ) -> AsyncIterator[UvSandbox]:
        """Opens a build sandbox that writes to `work`; with `egress`, it can reach the index. Raises SandboxFailure."""
        order = Order(
            slot.maker,
            build_spec(slot.image, egress=egress, disk_bytes=max(_DISK_BYTES, max_environment_bytes)),
            BuildMounts(work=work, programs=self._places.programs, egress=egress),
            self._network if egress else None,
        )
        async with open_build_sandbox(order) as running:
            yield UvSandbox(running, slot, work, max_environment_bytes, self._settings)


class UvSandbox:
    """A build sandbox in which uv runs."""

    def __init__(
        self, running: BuildSandbox, slot: BuildSlot, work: Path, max_environment_bytes: int, settings: BuildSettings
    ) -> None:
        self.running = running
        self._slot = slot
        self._work = work
        self._file_bytes = max_environment_bytes
        self._limit = Volume(settings.max_entries * _VOLUME_FACTOR, max_environment_bytes * _VOLUME_FACTOR)
        self._timeout_s = settings.build_timeout_s

    async def run(self, task: UvTask, listener: Listener, on_progress: Callable[[Progress], None]) -> Python:
        """Runs a task to its end; returns the sandbox's Python.

        Raises EnvironmentFailed with uv's explanation, ImageNotReady for temporary failures, SandboxFailure.
        """
        run = _Run(listener, on_progress)
        text = program("run_uv", _task(task, self._file_bytes))
        running = asyncio.create_task(self.running.run(text, time_s=self._timeout_s, on_line=run.take))
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait([running, watching], return_when=asyncio.FIRST_COMPLETED)
            await (watching if watching.done() else running)
        except BuildTimeout as timeout:
            raise ImageNotReady(
                f"the packages could not be downloaded within {self._timeout_s:g} s", RETRY_S
            ) from timeout
        finally:
            for each in (running, watching):
                each.cancel()
            await asyncio.gather(running, watching, return_exceptions=True)
        return run.end(self._slot, self.running.denials)

    async def _watch(self) -> None:
        """Raises EnvironmentFailed when more is written than an environment may have."""
        pause_s = _WATCH_INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            found = await asyncio.to_thread(volume_of, self._work)
            pause_s = max(_WATCH_INTERVAL_S, _WATCH_PAUSES * (time.monotonic() - began_s))
            if not found.fits(self._limit):
                _log.warning("build_too_large", entries=found.entries, size_bytes=found.size_bytes)
                raise EnvironmentFailed("these packages unpack to more bytes or files than an environment may have")


def build_spec(image: str, *, egress: bool, disk_bytes: int = _DISK_BYTES) -> SandboxSpec:
    """Returns the spec of a build sandbox. No policy applies, since no session's code runs there.

    `disk_bytes` bounds the largest file that can be written anywhere in it; for uv it is an environment's limit.
    """
    return SandboxSpec(
        image=image,
        memory_bytes=_MEMORY_BYTES,
        processes=_PROCESSES,
        disk_bytes=disk_bytes,
        orphan_time_s=_ORPHAN_TIME_S,
        egress=egress,
    )


def _task(task: UvTask, file_bytes: int) -> dict[str, Any]:
    return {
        "command": task.command,
        "environment": environment(),
        "directory": WORK_PATH,
        "input": task.text,
        "output": task.output,
        "files": task.files,
        "file_bytes": file_bytes,
    }


_KEYS = {
    reasons.NOT_ALLOWED: "index_hosts in [environments] allows it",
    reasons.REFUSED_ADDRESS: "internal in [egress] opens ranges of private addresses",
    reasons.UNRESOLVED: "check index_url in [environments] and resolver in [egress]",
    reasons.RESOLVER_TIMEOUT: "check resolver in [egress]",
    reasons.UNREACHED: "check index_url in [environments] and upstream_proxy in [egress]",
    reasons.UPSTREAM_CERTIFICATE: "ca_file in [egress] names further authorities",
    reasons.SECRET_MISSING: "check secrets in [egress]",
}


def _refused(denial: EgressDenial) -> str:
    key = _KEYS.get(denial.reason, "the administrator's log has more")
    return f"the packages can't be downloaded from the index or its file host: {denial.sentence}; {key}"


@dataclass
class _Run:
    """One run of uv, as reported by its program."""

    listener: Listener
    on_progress: Callable[[Progress], None]
    described: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    unusable: str = ""

    def take(self, said: dict[str, Any]) -> None:
        match said:
            case {"line": str(line)}:
                if (progress := self.listener.take(line)) is not None:
                    self.on_progress(progress)
            case {"downloaded": int(count)}:
                self.on_progress(self.listener.progress(count))
            case {"python": dict(described)}:
                self.described = described
            case {"exit": int(code)}:
                self.exit_code = code
            case {"unusable": str(why)}:
                self.unusable = "".join(each for each in why[:200] if each.isprintable())

    def end(self, slot: BuildSlot, denials: Sequence[EgressDenial]) -> Python:
        if self.unusable:
            raise EnvironmentFailed(
                f"uv can't run in the image {slot.image!r} ({self.unusable}): its C library or processor differs from "
                "the daemon's; set a statically linked uv as uv in [environments]"
            )
        python = self._python()
        if self.exit_code is None or python is None:
            raise ImageNotReady("the program that builds environments did not report its end", RETRY_S)
        if self.exit_code < 0:
            why = f"uv was killed by signal {-self.exit_code}, probably because memory was short"
            raise ImageNotReady(f"could not install the packages: {why}; try again", RETRY_S)
        forbidden = [each for each in denials if each.reason == reasons.NOT_ALLOWED]
        if self.exit_code and forbidden:
            raise ImageNotReady(_refused(forbidden[-1]))
        if self.exit_code and denials and self.listener.may_pass:
            raise ImageNotReady(_refused(denials[-1]), RETRY_S)
        if self.exit_code:
            explanation = self.listener.explanation or "uv ended without an explanation"
            if self.listener.may_pass:
                raise ImageNotReady(f"could not install the packages: {explanation}", RETRY_S)
            raise EnvironmentFailed(f"the packages can't be installed: {explanation}")
        return python

    def _python(self) -> Python | None:
        texts = [self.described.get(name) for name in ("version", "platform", "executable")]
        checked = [text for text in texts if isinstance(text, str) and 0 < len(text) < 1000 and text.isprintable()]
        return Python(*checked) if len(checked) == len(texts) else None
