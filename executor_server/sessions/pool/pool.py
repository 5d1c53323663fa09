"""The warm pool: prewarmed sandboxes, whose guests have answered.

The pool keeps a number of sandboxes of each configured spec, and one of each of the few other specs that sessions
often request. Taking one starts a refill in the background; if there is none, the caller gets one made on demand. A
sandbox is handed out once: used sandboxes are never reused. Outdated ones, whose image or guest has changed, are not
handed out.

If several backends can make a kind, sandboxes of the earliest backend are handed out first. Those of a later backend
are discarded one at a time, each after an earlier backend has made its replacement. So a backend that is unstable or
nearly full does not empty the pool.

Accounting: each sandbox is kept, or was a hit, or was discarded for exactly one of three reasons.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial

import structlog

from executor_server.backends import Backend, Sandbox
from executor_server.backends.channel import READY_TIME_S, GuestChannel, GuestEndpoint, UnreachedError
from executor_server.core import (
    BackendFull,
    EnvironmentFailed,
    ImageNotReady,
    SandboxFailure,
    SandboxSpec,
    SpecUnsupported,
)
from executor_server.policy import WarmSandboxes
from executor_server.sessions.pool.asked_kinds import AskedKinds, AskedSettings
from executor_server.sessions.pool.fail_over import create_with
from executor_server.sessions.pool.kind import Kind, PoolStats, ReadySandbox

# Seconds from a take until a refill: making a sandbox takes a processor, and the new session's first step goes first.
_REFILL_PAUSE_S = 0.05
# Seconds between two attempts to make sandboxes: starting a process blocks the event loop.
_PAUSE_S = 0.01
# Attempts to connect to a new sandbox over an unreliable network.
_FIRST_CONNECTIONS_MAX = 3

Prepare = Callable[[Sequence[SandboxSpec]], Awaitable[Iterable[SandboxSpec]]]
"""Prepares a backend for these kinds and no others; returns those that it makes better from now on."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PoolSettings:
    """Waits and intervals of the pool, which makes one sandbox at a time.

    A guest that receives nothing for its orphan_time_s ends itself, so kept ones are pinged every `ping_interval_s`.
    """

    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    ping_interval_s: float = 10.0
    check_interval_s: float = 5.0  # between two checks that kept ones are up to date
    asked: AskedSettings = field(default_factory=AskedSettings)
    # Until a backend prepares for the kinds: a daemon that runs for a few seconds would spend most of them on that.
    prepare_after_s: float = 2.0


class WarmPool:
    """Keeps sandboxes ready, and owns those that it has not handed out."""

    def __init__(self, backend: Backend, settings: PoolSettings, prepare: Prepare | None = None) -> None:
        self._backend = backend
        self._settings = settings
        self._prepare = prepare
        self._kinds: dict[SandboxSpec, Kind] = {}
        self._configured: dict[SandboxSpec, int] = {}
        self._asked = AskedKinds(settings.asked)
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()  # set when the kinds have changed
        self._tasks: list[asyncio.Task[None]] = []
        self._discards: set[asyncio.Task[None]] = set()
        self._taken_s = -_REFILL_PAUSE_S
        self._closed = False

    def keep_ready(self, kinds: Sequence[WarmSandboxes]) -> None:
        """Keeps these ready from now on, in the background; discards kept and unfinished ones of other specs."""
        self._configured = {kind.spec: kind.size for kind in kinds}
        self._asked.clear()
        self._set_sizes(self._configured)

    def _follow_requests(self) -> None:
        """Keeps those that are often requested, in addition to the configured ones."""
        wanted = {**self._configured, **{spec: 1 for spec in self._asked.kept if spec not in self._configured}}
        if wanted.keys() != self._kinds.keys():
            self._set_sizes(wanted)

    def _set_sizes(self, wanted: Mapping[SandboxSpec, int]) -> None:
        if self._closed:
            return
        for kind in self._kinds.values():
            kind.size = wanted.get(kind.spec, 0)
            self._drop_surplus(kind)
        self._kinds = {spec: self._kinds.get(spec) or Kind(spec, size) for spec, size in wanted.items()}
        self._wanted.set()
        self._changed.set()
        if not self._tasks and any(wanted.values()):
            self._start_tasks()

    def _start_tasks(self) -> None:
        settings = self._settings
        self._tasks = [asyncio.create_task(self._refill_forever())]
        for step, interval_s in (
            (self._ping, settings.ping_interval_s),
            (self._check, settings.check_interval_s),
        ):
            self._tasks.append(asyncio.create_task(_repeat(step, interval_s)))
        if self._prepare is not None:
            self._tasks.append(asyncio.create_task(_repeat(partial(self._prepare_kinds, self._prepare), 0.0)))

    async def take(
        self, spec: SandboxSpec, turn: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    ) -> ReadySandbox:
        """Returns a ready sandbox: a kept one, else one that is made within `turn`. Raises SandboxFailure."""
        kind = self._kinds.get(spec)
        if kind is None:
            async with turn():
                ready = await self._make_on_demand(spec)
            self._taken_s = _now_s()
            self._note_request(spec)
            return ready
        self._note_request(spec)
        self._taken_s = _now_s()
        self._wanted.set()
        kept = self._take_kept(kind)
        if kept is not None:
            kind.counts.hits += 1
            return kept
        kind.counts.misses += 1
        async with turn():
            started_s = _now_s()
            ready = await self._make_on_demand(spec)
        kind.note_ready(_now_s() - started_s)
        return ready

    async def _make_on_demand(self, spec: SandboxSpec) -> ReadySandbox:
        try:
            return await make_ready(self._backend, spec, warm=False)
        except (ImageNotReady, EnvironmentFailed, SpecUnsupported):
            raise
        except SandboxFailure:  # sandboxes are scarce, so none is kept just because it may be requested
            self._asked.clear()
            self._follow_requests()
            raise

    def _note_request(self, spec: SandboxSpec) -> None:
        if spec not in self._configured:
            self._asked.note(spec, _now_s())
            self._follow_requests()

    def stats(self) -> dict[SandboxSpec, PoolStats]:
        """Returns the counts of each spec that is kept ready."""
        return {spec: kind.stats() for spec, kind in self._kinds.items()}

    async def close(self) -> None:
        """Ends refilling and destroys what is kept."""
        self._closed = True
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for kind in self._kinds.values():
            while kind.kept:
                kind.counts.closed += 1
                self._discard(kind.kept.popleft())
        await asyncio.gather(*self._discards, return_exceptions=True)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _take_kept(self, kind: Kind) -> ReadySandbox | None:
        """Returns the best one that is alive and up to date, without waiting."""
        while kind.kept:
            ready = kind.best
            kind.kept.remove(ready)
            if not ready.channel.connected:
                kind.counts.lost += 1
                self._discard(ready)
            elif not kind.is_current(ready):
                kind.counts.outdated += 1
                self._discard(ready)
            else:
                ready.channel.on_lost = _ignore
                return ready
        return None

    def _keep(self, kind: Kind, ready: ReadySandbox) -> None:
        def on_lost(reason: str) -> None:
            """Discards one that died while it was kept."""
            _log.warning("pooled_sandbox_lost", sandbox_id=ready.sandbox.sandbox_id, reason=reason)
            kind.kept.remove(ready)
            kind.counts.lost += 1
            self._discard(ready)

        kind.counts.made += 1
        if self._kinds.get(kind.spec) is not kind:  # the kind was dropped meanwhile
            kind.counts.outdated += 1
            self._discard(ready)
            return
        kind.kept.append(ready)
        ready.channel.on_lost = on_lost
        if not ready.channel.connected:
            on_lost("the channel closed before the sandbox was kept")
        self._drop_surplus(kind)

    def _drop_surplus(self, kind: Kind) -> None:
        while len(kind.kept) > kind.size:
            self._drop_outdated(kind, kind.worst)

    def _drop_outdated(self, kind: Kind, ready: ReadySandbox) -> None:
        kind.kept.remove(ready)
        kind.counts.outdated += 1
        self._discard(ready)

    def _discard(self, ready: ReadySandbox) -> None:
        """Destroys one that the caller has counted and removed from the kept ones."""
        self._wanted.set()
        ready.channel.on_lost = _ignore
        ready.channel.close()
        task = asyncio.create_task(_destroy(ready.sandbox))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    # -- refilling -------------------------------------------------------------------------------------------------

    async def _refill_forever(self) -> None:
        while True:
            await asyncio.sleep(max(_PAUSE_S, self._taken_s + _REFILL_PAUSE_S - _now_s()))
            self._wanted.clear()  # before the check below, so that no later request is missed
            kind = self._due_kind()
            if kind is not None:
                await self._make(kind)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(self._next_retry_s()):
                        await self._wanted.wait()

    def _due_kind(self) -> Kind | None:
        """Returns the kind with the oldest last attempt, so that a failing one does not delay the others."""
        now_s = _now_s()
        due = [kind for kind in self._kinds.values() if kind.wants and kind.retry_s <= now_s]
        return min(due, key=lambda kind: kind.tried_s, default=None)

    def _next_retry_s(self) -> float | None:
        return min((kind.retry_s for kind in self._kinds.values() if kind.wants), default=None)

    async def _make(self, kind: Kind) -> None:
        kind.making += 1
        kind.tried_s = _now_s()
        try:
            ready = await make_ready(self._backend, kind.spec, warm=True)
        except SandboxFailure as failure:
            wait_s = self._back_off(kind, failure)
            if isinstance(failure, ImageNotReady) and failure.progress is not None:  # it is being made
                _log.info("pool_waits", image=kind.spec.image, progress=str(failure.progress), retry_after_s=wait_s)
                return
            kind.counts.failed += 1
            if isinstance(failure, EnvironmentFailed):
                self._asked.forget(kind.spec)
                self._follow_requests()
            _log.warning("pool_refill_failed", image=kind.spec.image, error=str(failure), retry_after_s=wait_s)
            return
        except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end refilling for good
            kind.counts.failed += 1
            self._wait_longest(kind)
            _log.exception("pool_refill_broke", image=kind.spec.image, retry_after_s=self._settings.max_backoff_s)
            return
        finally:
            kind.making -= 1
            self._wanted.set()
        kind.note_ready(_now_s() - kind.tried_s)
        self._keep(kind, ready)
        try:
            await self._confirm(kind, ready)
        except Exception:  # noqa: BLE001 - as above
            self._wait_longest(kind)
            _log.exception("pool_check_broke", image=kind.spec.image, retry_after_s=self._settings.max_backoff_s)

    async def _confirm(self, kind: Kind, made: ReadySandbox) -> None:
        """Checks that a new sandbox is up to date; if not, the next attempt waits."""
        if not kind.is_known(made) or not kind.is_current(made):
            await self._check_kind(kind, [made.sandbox.backend_name])
        if kind.is_current(made):
            kind.backoff_s = 0.0
        else:
            wait_s = self._back_off(kind, None)
            _log.warning("pool_made_outdated", image=kind.spec.image, retry_after_s=wait_s)

    def _back_off(self, kind: Kind, failure: SandboxFailure | None) -> float:
        """Delays the next attempt: for the time that the failure names, else twice as long as before."""
        settings = self._settings
        if isinstance(failure, (ImageNotReady, BackendFull)) and failure.retry_after_s is not None:
            wait_s = min(max(failure.retry_after_s, settings.backoff_s), settings.max_backoff_s)
        else:
            wait_s = kind.backoff_s = min(max(kind.backoff_s * 2, settings.backoff_s), settings.max_backoff_s)
        kind.retry_s = _now_s() + wait_s
        return wait_s

    def _wait_longest(self, kind: Kind) -> None:
        kind.backoff_s = self._settings.max_backoff_s
        kind.retry_s = _now_s() + kind.backoff_s

    # -- periodic steps --------------------------------------------------------------------------------------------

    async def _ping(self) -> None:
        for kind in self._kinds.values():
            for ready in kind.kept:
                ready.channel.ping()

    async def _prepare_kinds(self, prepare: Prepare) -> None:
        """Prepares the backend for changed kinds, and replaces sandboxes that it now makes better."""
        await self._changed.wait()
        await asyncio.sleep(self._settings.prepare_after_s)
        self._changed.clear()
        try:
            improved = await prepare([kind.spec for kind in self._kinds.values() if kind.size])
        except SandboxFailure as failure:
            _log.warning("pool_not_prepared", error=str(failure))
            await asyncio.sleep(self._settings.max_backoff_s)
            self._changed.set()
            return
        for spec in improved:
            if (kind := self._kinds.get(spec)) is not None:
                while kind.kept:
                    self._drop_outdated(kind, kind.kept[0])

    async def _check(self) -> None:
        self._asked.expire(_now_s())
        self._follow_requests()
        for kind in list(self._kinds.values()):  # `keep_ready` may replace them meanwhile
            await self._check_kind(kind, dict.fromkeys(ready.sandbox.backend_name for ready in kind.kept))
            if kind.better:
                await self._try_better(kind)

    async def _check_kind(self, kind: Kind, backends: Iterable[str]) -> None:
        """Gets the current fingerprints and discards outdated sandboxes; without an answer, does nothing."""
        for backend in backends:
            try:
                kind.fingerprints[backend] = await self._backend.fingerprint(kind.of([backend]))
                kind.unanswered.discard(backend)
            except SandboxFailure as failure:
                if backend not in kind.unanswered:
                    _log.warning("pool_check_failed", image=kind.spec.image, backend=backend, error=str(failure))
                kind.unanswered.add(backend)
        for ready in [ready for ready in kind.kept if not kind.is_current(ready)]:
            self._drop_outdated(kind, ready)

    async def _try_better(self, kind: Kind) -> None:
        """Makes one on an earlier backend, if that works again. Its health logs the failure if it does not."""
        kind.making += 1
        try:
            ready = await make_ready(self._backend, kind.of(kind.better), warm=True)
        except SandboxFailure:
            return
        finally:
            kind.making -= 1
        self._keep(kind, ready)


async def make_ready(backend: Backend, spec: SandboxSpec, *, warm: bool) -> ReadySandbox:
    """Makes a sandbox and waits for its guest. Raises SandboxFailure; nothing is left behind then.

    A guest that does not answer counts as a failure of its backend: the next backend is asked, if there is one.
    """

    async def connected(sandbox: Sandbox) -> ReadySandbox:
        channel = GuestChannel(sandbox.endpoint)
        try:
            await _connect(channel, sandbox.endpoint)
        except BaseException:
            channel.close()
            await asyncio.shield(sandbox.destroy())
            raise
        return ReadySandbox(sandbox, channel, warm)

    return await create_with(backend, spec, connected)


async def _connect(channel: GuestChannel, endpoint: GuestEndpoint) -> None:
    """Connects to the guest; over an unreliable network, in several attempts."""
    give_up_s = asyncio.get_running_loop().time() + READY_TIME_S
    for retries in reversed(range(_FIRST_CONNECTIONS_MAX if endpoint.breaks_by_itself else 1)):
        left_s = give_up_s - asyncio.get_running_loop().time()
        try:
            await channel.connect(left_s, answer_s=READY_TIME_S / 3 if retries else READY_TIME_S)
            return
        except UnreachedError:
            if not retries or left_s <= 0:
                raise


async def _repeat(step: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            await step()
        except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end it for good
            _log.exception("pool_step_broke")


async def _destroy(sandbox: Sandbox) -> None:
    try:
        await sandbox.destroy()
    except SandboxFailure as failure:
        _log.error("sandbox_not_destroyed", sandbox_id=sandbox.sandbox_id, error=str(failure))


def _ignore(_reason: str) -> None:
    """Does nothing: the new owner of the channel sets its own callback."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()
