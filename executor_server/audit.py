"""The audit log as the daemon writes it: each record before what it is about takes place.

`write` puts a record into the log, where the kernel has it: that outlives the daemon. What it takes to outlive the host
is the configuration's choice (`audit.sync`): with `always`, `durable` returns when all records so far are on the disk,
several of them per fsync; with `interval` that happens once in a while; with `never` when the system likes.

A log that can't be written never raises and never blocks for good. `write` says False, and whoever asked decides what
that means for it. What was not written is counted, and said in the log as soon as it can be written again. The first
failure is told to whoever wants to end what may not go on unwatched (`on_failing`).
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

from executor_server.audit_chain import AuditKind
from executor_server.audit_files import AuditDirError, AuditFiles, Flush

# A disk that takes longer is as good as one that fails.
FLUSH_TIME_S = 10.0
# How often a log that can't be written is tried again, at most, and how often that is said.
RETRY_INTERVAL_S = 0.25
COMPLAINT_INTERVAL_S = 60.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class AuditSettings:
    """How the log is brought to the disk."""

    sync: Literal["always", "interval", "never"] = "interval"
    sync_interval_s: float = 1.0


@dataclass
class AuditStats:
    """What metrics say of the log. Read by them, written here only."""

    records: int = 0
    bytes: int = 0
    lost_records: int = 0
    failures: int = 0  # times that it began to fail
    flushes: int = 0
    is_failing: bool = False


@dataclass
class _Gap:
    """What could not be written since the log failed."""

    since: str
    error: str
    lost: Counter[str] = field(default_factory=Counter)
    # The disk failed to keep what the kernel took: only a flush can show that it does again.
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
        self._complaint_s = 0.0
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
        """Brings what is written to the disk, and lets go of it. Idempotent."""
        if self._ticker is None:
            return
        self._ticker.cancel()
        await asyncio.gather(self._ticker, return_exceptions=True)
        self._ticker = None
        for told in self._on_tick:
            told()
        if self._flushing is not None:
            await self._flush()
        await self._flush()
        if self._gap is not None:
            self._retry_s = 0.0
            await self._recover()
            await self._flush()
        if self._gap is not None:
            _log.error("audit_records_lost", lost=self._gap.lost.total(), error=self._gap.error)
        # A disk that does not answer is not waited for, and what it still uses is left open.
        hangs = self._flushing is not None
        self._thread.shutdown(wait=not hangs)
        if not hangs:
            self._files.close()

    def on_failing(self, told: Callable[[], None]) -> None:
        """Has this called, from the event loop, whenever the log can't be written any more."""
        self._on_failing.append(told)

    def on_tick(self, told: Callable[[], None]) -> None:
        """Has this called once in a while, and before the end."""
        self._on_tick.append(told)

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, kind: AuditKind, fields: Mapping[str, Any]) -> bool:
        """Puts a record into the log. False: it is not there, and is counted as lost."""
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
        """Waits until what has been written is as safe as it is to be. False: it is not, and won't be."""
        if self._settings.sync != "always":
            return True
        wanted, failures = self._files.position.seq, self.stats.failures
        while self._flushed_seq < wanted and self._gap is None and self.stats.failures == failures:
            # Whoever comes while one flush runs waits for the next, and all of them for the same.
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
        for told in self._on_tick:
            told()
        if self._gap is not None:
            await self._recover()
        elif self._settings.sync == "interval" and self._flushed_seq < self._files.position.seq:
            await self._flush()

    async def _flush(self) -> None:
        """Waits for the flush that runs, or for one that is begun now, as long as a disk may take."""
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
            # What the kernel could not bring to the disk it may have let go of: a new file has no such holes.
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
            self._complain()
            for told in self._on_failing:
                # Not from here: whoever writes a record is in the middle of something.
                asyncio.get_running_loop().call_soon(told)
        self._gap.needs_flush = self._gap.needs_flush or in_flush

    def _lose(self, kind: AuditKind) -> None:
        assert self._gap is not None
        self._gap.lost[kind.value] += 1
        self.stats.lost_records += 1
        if time.monotonic() - self._complaint_s > COMPLAINT_INTERVAL_S:
            self._complain()

    def _complain(self) -> None:
        assert self._gap is not None
        self._complaint_s = time.monotonic()
        _log.error("audit_not_written", error=self._gap.error, since=self._gap.since, lost=self._gap.lost.total())

    async def _recover(self) -> None:
        """Tries to have a log that failed written again."""
        if self._gap is not None and self._gap.needs_flush and self._flushing is None:
            try:
                self._files.mend(new_file=True)
            except (OSError, AuditDirError):
                return
            await self._flush()
        self._mended()

    def _mended(self) -> bool:
        """Whether the log, which failed, can be written again; if so, it says what it lacks."""
        gap = self._gap
        now_s = time.monotonic()
        # What a flush that hangs still uses is not to be closed under it.
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
    return datetime.now(UTC).isoformat(timespec="microseconds")[:-6] + "Z"  # for +00:00
