"""The audit log of a running daemon: writes records, before events that need admission and after others.

`write` hands a record to the kernel, where it survives the daemon. `audit.sync` decides what survives the host: with
`always`, `durable` returns when all records so far are on disk, many per fsync; with `interval` records are synced at
intervals; with `never` the system decides.

If the log can't be written, it never raises and never blocks forever. `write` returns False, and the caller decides
whether the event may take place. Lost records are counted, and their number is recorded as soon as the log can be
written again. Listeners are notified of the first failure (`on_failing`), to stop executions that may not run
unrecorded.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

import structlog

from executor_server.policy.audit.chain import AuditKind, Position
from executor_server.policy.audit.log_files import AuditDirError, AuditFiles, Flush

FLUSH_TIME_S = 10.0
"""Seconds that a flush may take; a slower disk counts as failing."""

RETRY_INTERVAL_S = 0.25
"""Seconds between attempts to write a log that failed."""

REPORT_INTERVAL_S = 60.0
"""Seconds between messages about lost records."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class AuditSettings:
    """When the log is synced to disk, from `[audit]` of the configuration."""

    sync: Literal["always", "interval", "never"] = "interval"
    sync_interval_s: float = 1.0


@dataclass
class AuditStats:
    """Counters for the metrics, which only read them."""

    records: int = 0
    bytes: int = 0
    lost_records: int = 0
    failures: int = 0  # times that writing began to fail
    flushes: int = 0
    is_failing: bool = False


@dataclass
class _Gap:
    """Records that were lost since the log failed."""

    since: str
    error: str
    lost: Counter[str] = field(default_factory=Counter)
    # The disk lost data that the kernel had accepted: only a successful flush shows that it works again.
    needs_flush: bool = False


class AuditLog:
    """The log of one daemon; used in its event loop."""

    def __init__(self, files: AuditFiles, settings: AuditSettings) -> None:
        self._files = files
        self._settings = settings
        self.stats = AuditStats()
        self._thread = ThreadPoolExecutor(1, "audit")
        self._ticker: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None
        self._flushed_seq = 0
        self._gap: _Gap | None = None
        self._new_file = False
        self._retry_s = 0.0
        self._reported_s = 0.0
        self._on_failing: list[Callable[[], None]] = []
        self._on_tick: list[Callable[[], None]] = []

    # -- from start to end -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens the log. Raises AuditDirError."""
        try:
            repairs = self._files.open()
        except AuditDirError:
            self._thread.shutdown()
            raise
        self._flushed_seq = self._files.position.seq
        for repair in repairs:
            _log.warning("audit_repaired", **repair)
            self.write(AuditKind.AUDIT_REPAIRED, repair)
        self._ticker = asyncio.create_task(self._tick_forever())

    async def close(self) -> None:
        """Syncs all records to disk and closes the files. Idempotent."""
        if self._ticker is None:
            return
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        self._ticker = None
        for call in self._on_tick:
            call()
        if self._flushing is not None:
            await self._flush()
        await self._flush()
        if self._gap is not None:
            self._retry_s = 0.0
            await self._recover()
            await self._flush()
        if self._gap is not None:
            _log.error("audit_records_lost", lost=self._gap.lost.total(), error=self._gap.error)
        # A flush that hangs is not waited for, and the files that it uses stay open.
        hangs = self._flushing is not None
        self._thread.shutdown(wait=not hangs)
        if not hangs:
            self._files.close()

    @property
    def position(self) -> Position:
        """The last record."""
        return self._files.position

    def on_failing(self, call: Callable[[], None]) -> None:
        """Registers a callback for the event loop to call whenever the log begins to fail."""
        self._on_failing.append(call)

    def on_tick(self, call: Callable[[], None]) -> None:
        """Registers a callback for every `sync_interval_s`, and for the end."""
        self._on_tick.append(call)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, kind: AuditKind, fields: Mapping[str, Any]) -> bool:
        """Writes a record. False: it could not be written, and is counted as lost."""
        if self._gap is not None and not self._mended():
            self._lose(kind)
            return False
        try:
            self._append(kind, fields)
        except OSError as error:
            self._fail(error)
            self._lose(kind)
            return False
        if self._files.files_changed and self._flushing is None:
            self._flushing = self._begun_flush()
        return True

    async def durable(self) -> bool:
        """Waits until all records so far are as durable as `sync` requires. False: they won't be."""
        if self._settings.sync != "always":
            return True
        wanted, failures = self._files.position.seq, self.stats.failures
        while self._flushed_seq < wanted and self._gap is None and self.stats.failures == failures:
            # All callers that come while one flush runs share the next.
            await self._flush()
        return self._flushed_seq >= wanted

    def _append(self, kind: AuditKind, fields: Mapping[str, Any]) -> None:
        self.stats.bytes += self._files.append(_now(), kind, fields)
        self.stats.records += 1

    # -- the disk --------------------------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sync_interval_s)
            try:
                await self._tick()
            except Exception:  # noqa: BLE001 - a background owner: a bug of ours must not end it for good
                _log.exception("audit_tick_broke")

    async def _tick(self) -> None:
        for call in self._on_tick:
            call()
        if self._gap is not None:
            await self._recover()
        elif self._settings.sync == "interval" and self._flushed_seq < self._files.position.seq:
            await self._flush()

    async def _flush(self) -> None:
        """Waits for the running flush, or for one that begins now, at most FLUSH_TIME_S."""
        if self._flushing is None:
            if not self._files.is_open:
                return
            self._flushing = self._begun_flush()
        done, _ = await asyncio.wait((self._flushing,), timeout=FLUSH_TIME_S)
        if not done:
            self._fail(OSError(errno.ETIMEDOUT, "the disk does not answer"), in_flush=True)

    def _begun_flush(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run_flush(self._files.flush()))

    async def _run_flush(self, flush: Flush) -> None:
        sync = self._settings.sync != "never"
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, lambda: flush.run(sync=sync))
            self._flushed_seq = flush.position.seq
            self.stats.flushes += 1
            if self._gap is not None:
                self._gap.needs_flush = False
        except OSError as error:
            # The kernel may have dropped pages that it could not write. A new file has no such holes.
            self._fail(error, in_flush=True)
        except Exception:  # noqa: BLE001 - a background owner: a bug of ours is one more reason why nothing is safe
            _log.exception("audit_flush_broke")
            self._fail(OSError(errno.EIO, "internal error"), in_flush=True)
        finally:
            self._flushing = None

    # -- failing ---------------------------------------------------------------------------------------------------

    def _fail(self, error: OSError, *, in_flush: bool = False) -> None:
        self._new_file = self._new_file or in_flush or error.errno == errno.EFBIG
        self._retry_s = time.monotonic() + RETRY_INTERVAL_S
        if self._gap is None:
            self.stats.failures += 1
            self._gap = _Gap(_now(), errno.errorcode.get(error.errno or 0, "EIO"))
            self.stats.is_failing = True
            self._report()
            for call in self._on_failing:
                # Later: the caller of `write` is in the middle of a step.
                asyncio.get_running_loop().call_soon(call)
        self._gap.needs_flush = self._gap.needs_flush or in_flush

    def _lose(self, kind: AuditKind) -> None:
        assert self._gap is not None
        self._gap.lost[kind.value] += 1
        self.stats.lost_records += 1
        if time.monotonic() - self._reported_s > REPORT_INTERVAL_S:
            self._report()

    def _report(self) -> None:
        assert self._gap is not None
        self._reported_s = time.monotonic()
        _log.error("audit_not_written", error=self._gap.error, since=self._gap.since, lost=self._gap.lost.total())

    async def _recover(self) -> None:
        """Tries to make a log that failed writable again."""
        if self._gap is not None and self._gap.needs_flush and self._flushing is None:
            try:
                self._files.mend(new_file=True)
            except (OSError, AuditDirError):
                return
            await self._flush()
        self._mended()

    def _mended(self) -> bool:
        """Returns True if the log can be written; a gap has been recorded then."""
        gap = self._gap
        now_s = time.monotonic()
        # The files of a flush that hangs must not be closed while it uses them.
        if gap is None or gap.needs_flush or now_s < self._retry_s or self._flushing is not None:
            return gap is None
        self._retry_s = now_s + RETRY_INTERVAL_S
        try:
            self._files.mend(new_file=self._new_file)
            self._new_file = False
            lost = {"records": gap.lost.total(), "kinds": dict(gap.lost), "since": gap.since, "error": gap.error}
            self._append(AuditKind.AUDIT_GAP, lost)
        except (OSError, AuditDirError):
            return False
        self._gap = None
        self.stats.is_failing = False
        _log.warning("audit_written_again", lost=gap.lost.total())
        return True


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")[:-6] + "Z"  # instead of +00:00
