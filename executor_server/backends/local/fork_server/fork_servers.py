"""The fork servers of one daemon: which kinds of sandboxes have one, and when it is started, replaced and retired.

The pool names the kinds that it keeps ready, and these have a fork server. Bubblewrap makes every other sandbox, and
the reason is counted: the pool does not keep the kind, its fork server is starting (a second, for which no session
waits), or the last one has failed.

A fork server is replaced after a number of sandboxes or some time. All its children have the same memory layout and the
same seed of string hashes, so what one of them reveals helps against its siblings; the replacement bounds how many
there are. The successor starts first, and the predecessor serves until the successor is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import structlog

from executor_server.backends.local.descriptors import wait_readable
from executor_server.backends.local.fork_server.fork import SandboxPlan, fork
from executor_server.backends.local.fork_server.fork_server import Blueprint, ForkServer, start_fork_server
from executor_server.backends.local.fork_server.forked_process import ForkedProcess, ForkFailed
from executor_server.backends.local.fork_server.packets import now
from executor_server.backends.local.fork_server.records import ForkServerRecords, OrphanedForkServer
from executor_server.backends.local.images import Image
from executor_server.backends.local.layout import Layout, environment_of
from executor_server.backends.local.records import ProcessRecord
from executor_server.backends.local.resources import Resources
from executor_server.backends.settings import AMPLE_PROCESSES, WORKSPACE, numeric_threads
from executor_server.backends.teardown import failures_of
from executor_server.core import SandboxFailure, SandboxSpec

MODULES = ("numpy", "pandas", "PIL.Image", "matplotlib.pyplot", "seaborn")
"""Modules that a template process imports, where the image has them: those that agents use most, known to be fit for a
fork. The others of the data stack keep threads (polars), or take less time to import than a step does (scikit-learn,
plotly)."""

# Bytes of a sandbox's memory below which its fork server imports no modules: they would take too large a part of it.
_MODULES_FROM_BYTES = 1024 * 1024 * 1024
# Seconds until a fork server must be ready; the imports of a loaded machine take some.
_START_TIME_S = 60.0
_NOT_IN_TIME = "it was not ready in time"
# Sandboxes of one fork server, and seconds of its life, before it is replaced.
_MAX_REQUESTS = 500
_MAX_AGE_S = 1800.0
# Kinds of sandboxes that have a fork server at a time.
_MAX_KEPT = 4
# Seconds after a fork server failed until the next of the same kind is started; doubled with each failure.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 600.0
_END_TIME_S = 10.0
_ID_BYTES = 8
# Kinds that are remembered: examining the paths of an image takes longer than the rest of choosing a fork server.
_BLUEPRINTS_KNOWN = 16
# A sandbox mounts its own file systems here, which would hide what lies below; directories below /tmp are kept.
_REPLACED = tuple(Path(name) for name in ("/dev", "/proc", "/var/tmp", "/workspace"))
_COVERED = (*_REPLACED, Path("/tmp"))

# Reasons for using bubblewrap that every daemon meets, and that are no cause for concern.
_EXPECTED = ("rare", "starting")

_log = structlog.get_logger(__name__)


def below_tmp(image: Image) -> list[str]:
    """Returns the directories of the image that lie in /tmp."""
    return [str(each) for each in image.directories if each.is_relative_to("/tmp")]


class Fallback(Exception):
    """No fork server makes this sandbox: bubblewrap has to. `reason` is a word for the metric."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass
class ForkServerStats:
    """Counts since the start of the daemon."""

    made: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass
class _Pause:
    """A kind whose fork server has failed."""

    until: float
    seconds: float


class ForkServers:
    """Owns them from `start` to `close`."""

    def __init__(self, state_dir: Path, users: tuple[int, int, int] | None) -> None:
        """`users`: the first host user of fork servers, the first of sandboxes and their number; None: the daemon's."""
        self._records = ForkServerRecords(state_dir)
        self._users = users
        self._serving: dict[Blueprint, ForkServer] = {}
        self._successors: dict[Blueprint, ForkServer] = {}
        self._retired: list[ForkServer] = []
        self._orphans: list[OrphanedForkServer] = []
        self._pauses: dict[Blueprint, _Pause] = {}
        self._kept: set[Blueprint] = set()
        self.stats = ForkServerStats()

    # -- making sandboxes

    async def make(
        self,
        blueprint: Blueprint,
        plan: Callable[[tuple[str, ...]], SandboxPlan],
        on_here: Callable[[int, ForkedProcess], None],
    ) -> ForkedProcess:
        """Forks a sandbox. `plan` gets the modules that the template process has imported.

        Raises Fallback; nothing of the sandbox is left then.
        """
        if not self.keeps(blueprint):
            raise Fallback("rare", "no sandbox of this kind is kept ready")
        server = self._server(blueprint)
        try:
            process = await fork(server, plan(server.imported), on_here)
        except ForkFailed as failure:
            if failure.reason == "silent":
                self._give_up(server, str(failure))
            raise Fallback(failure.reason, str(failure)) from failure
        self.stats.made += 1
        return process

    def keeps(self, blueprint: Blueprint) -> bool:
        return blueprint in self._serving or blueprint in self._kept

    def blueprint(self, resources: Resources, image: Image, spec: SandboxSpec) -> Blueprint:
        """Returns the kind of fork server that makes such sandboxes. Raises Fallback."""
        # With a network, a program may install another version of a module, and expects to import that. A library reads
        # the number of its threads at import, so a sandbox with few processes gets no imported libraries.
        with_modules = (
            spec.memory_bytes >= _MODULES_FROM_BYTES
            and not spec.egress
            and numeric_threads(spec.processes) == numeric_threads(AMPLE_PROCESSES)
        )
        spec = replace(spec, processes=AMPLE_PROCESSES)  # each sandbox sets its own variables
        return replace(
            _blueprint(resources.layout, image, tuple(environment_of(image, spec).items())),
            modules=MODULES if with_modules else (),
            users=self._users,
            owner=spec.fork_server.partition(":")[2],
        )

    def note_fallback(self, fallback: Fallback) -> None:
        """Counts a sandbox that bubblewrap makes, and says why; the same reason is logged as a warning once."""
        reason = fallback.reason
        if not self.stats.fallbacks[reason] and reason not in _EXPECTED:
            _log.warning("fork_server_not_used", reason=reason, detail=str(fallback))
        else:
            _log.debug("fork_server_not_used", reason=reason, detail=str(fallback))
        self.stats.fallbacks[reason] += 1

    def _server(self, blueprint: Blueprint) -> ForkServer:
        self._tidy()
        fork_server = self._serving.get(blueprint)
        if fork_server is None:
            self._start(blueprint, self._serving)
            raise Fallback("starting", "the fork server is being made")
        if not fork_server.is_ready:
            if now() - fork_server.started_at >= _START_TIME_S:
                fork_server.retire(_NOT_IN_TIME)
                self._tidy()
            raise Fallback("starting", "the fork server is being made")
        worn = fork_server.requests >= _MAX_REQUESTS or now() - fork_server.started_at >= _MAX_AGE_S
        if worn and blueprint not in self._successors:
            with contextlib.suppress(Fallback):
                self._start(blueprint, self._successors)
        if fork_server.requests >= 2 * _MAX_REQUESTS:
            fork_server.retire("it has made twice its share of sandboxes")
            self._tidy()
            raise Fallback("starting", "the fork server's successor is being made")
        return fork_server

    def _start(self, blueprint: Blueprint, where: dict[Blueprint, ForkServer]) -> None:
        pause = self._pauses.get(blueprint)
        if pause is not None and now() < pause.until:
            raise Fallback("failing", "the last fork server of this kind has failed")
        try:
            where[blueprint] = start_fork_server(blueprint, secrets.token_hex(_ID_BYTES), self._note_init)
        except OSError as error:
            self._note_failure(blueprint)
            raise Fallback("failed", f"no fork server can be started: {error}") from error

    def _note_init(self, fork_server: ForkServer, init: ProcessRecord) -> None:
        self._records.write(fork_server.fork_server_id, init)

    # -- their ends

    def _give_up(self, fork_server: ForkServer, reason: str) -> None:
        fork_server.retire(reason)
        self._note_failure(fork_server.blueprint)
        self._tidy()

    def _note_failure(self, blueprint: Blueprint) -> None:
        last = self._pauses.get(blueprint)
        seconds = min(2 * last.seconds, _LONGEST_PAUSE_S) if last else _FIRST_PAUSE_S
        self._pauses[blueprint] = _Pause(now() + seconds, seconds)

    def _tidy(self) -> None:
        """Lets successors take over, sets ended ones aside, and releases those without sandboxes."""
        for blueprint, successor in list(self._successors.items()):
            if successor.is_ready or successor.ended_because:
                del self._successors[blueprint]
                if successor.ended_because:
                    self._put_away(successor)
                    continue
                predecessor = self._serving.pop(blueprint, None)
                self._serving[blueprint] = successor
                if predecessor is not None:
                    predecessor.retire("its successor is ready")
                    self._retired.append(predecessor)
        for blueprint, fork_server in list(self._serving.items()):
            if fork_server.ended_because:
                del self._serving[blueprint]
                self._put_away(fork_server)
            elif fork_server.requests and fork_server.is_ready:
                self._pauses.pop(blueprint, None)
        for fork_server in [each for each in self._retired if each.has_ended()]:
            self._retired.remove(fork_server)
            fork_server.release()
            self._records.remove(fork_server.fork_server_id)

    def _put_away(self, fork_server: ForkServer) -> None:
        if not fork_server.is_ready:
            self._note_failure(fork_server.blueprint)
        self._retired.append(fork_server)

    def sweep(self) -> None:
        """Retires servers that did not get ready, and removes the records of those that have ended."""
        for server in (*self._serving.values(), *self._successors.values()):
            if not server.is_ready and now() - server.started_at >= _START_TIME_S:
                server.retire(_NOT_IN_TIME)
        self._tidy()
        for orphan in [each for each in self._orphans if each.has_ended()]:
            self._orphans.remove(orphan)
            orphan.release()
            self._records.remove(orphan.fork_server_id)

    def adopt(self, with_sandboxes: Collection[str]) -> None:
        """Finds the fork servers of an earlier daemon: ends those without sandboxes, and waits for the others' end.

        Those without sandboxes end by themselves soon after their daemon, unless they hang.
        """
        for orphan in self._records.orphans():
            if orphan.fork_server_id not in with_sandboxes:
                orphan.kill()
            self._orphans.append(orphan)
        self.sweep()

    async def close(self) -> None:
        """Ends all of them, with every process that they still have. Raises SandboxFailure."""
        deadline = now() + _END_TIME_S
        fork_servers = [*self._serving.values(), *self._successors.values(), *self._retired]
        self._serving, self._successors, self._retired = {}, {}, []
        failures = await failures_of(self._end(fork_server, deadline) for fork_server in fork_servers)
        for orphan in self._orphans:
            orphan.kill()
            if not await wait_readable(orphan.pidfd, deadline):
                failures.append(SandboxFailure("a fork server of an earlier daemon does not end"))
                continue
            orphan.release()
            self._records.remove(orphan.fork_server_id)
        self._orphans = []
        if failures:
            raise failures[0]

    async def _end(self, fork_server: ForkServer, deadline: float) -> None:
        await fork_server.end(deadline)
        self._records.remove(fork_server.fork_server_id)

    async def keep(self, blueprints: Iterable[Blueprint]) -> Collection[Blueprint]:
        """Runs a fork server for each of the first few blueprints, and retires the others; returns the new ones."""
        self._kept = set(list(dict.fromkeys(blueprints))[:_MAX_KEPT])
        for server in (*self._serving.values(), *self._successors.values()):
            if server.blueprint not in self._kept:
                server.retire("no sandbox of its kind is kept ready")
        self._tidy()
        missing = [each for each in self._kept if each not in self._serving or not self._serving[each].serves]
        await asyncio.gather(*(self.trial(each) for each in missing))
        ready = [each for each in missing if each in self._serving and self._serving[each].serves]
        for each in ready:
            _log.info("fork_server_ready", modules=self._serving[each].imported)
        return ready

    async def trial(self, blueprint: Blueprint) -> str:
        """Makes a fork server of this kind; returns the reason when it does not serve."""
        with contextlib.suppress(Fallback):
            self._server(blueprint)
        fork_server = self._serving.get(blueprint)
        if fork_server is None:
            return "it can't be started"
        await fork_server.settled.wait()
        return "" if fork_server.serves else fork_server.last_words().rpartition("\n")[2] or fork_server.ended_because


@lru_cache(maxsize=_BLUEPRINTS_KNOWN)
def _blueprint(layout: Layout, image: Image, environment: tuple[tuple[str, str], ...]) -> Blueprint:
    """Returns a kind of fork server without its modules, users and owner. Raises Fallback."""
    links = [link for link, _ in image.links]
    for path, covering in [
        *((link, _COVERED) for link in links),
        *((each, _REPLACED) for each in image.directories),
    ]:
        if any(path.is_relative_to(covered) for covered in covering):
            raise Fallback("unsupported", f"the image has files in {path}")
    return Blueprint(
        guest=layout.guest.path,
        image_identity=image.identity,
        root=tuple(layout.fork_server_root(image)),
        python=image.python,
        environment=(*environment, ("PWD", WORKSPACE)),
        modules=(),
        users=None,
    )
