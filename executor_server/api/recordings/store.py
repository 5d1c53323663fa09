"""All recordings of the daemon: it makes them, removes them in time, and reads them for clients.

One thread writes all of them: what sessions report is collected for `WRITE_INTERVAL_S`, or until it has `BATCH_BYTES`.
Reading has threads of its own, so a slow client does not delay the writing. A daemon whose sessions are not recorded
has neither thread nor directory.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import structlog

from executor_api.limits import PIECE_BYTES
from executor_api.messages import write
from executor_api.recordings import ENTRY_LENGTH
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_server.api.recordings.files import (
    ENDED,
    ENTRY,
    REFERENCED,
    About,
    RecordingFiles,
    Snapshot,
    read_about,
)
from executor_server.api.recordings.recorder import HELD_BYTES_TOTAL, NoUpload, RecordedUpload, Recorder
from executor_server.api.recordings.writer import RecordingWriter
from executor_server.core import NotFound, Principal, Reason, ResourceExhausted
from executor_server.sessions import Recorders, RecordingStats, Session

WRITE_INTERVAL_S = 0.2
"""Seconds until a report is written; a killed daemon loses the reports of that time."""
BATCH_BYTES = 256 << 10
SWEEP_INTERVAL_S = 60.0
RECORDINGS_MAX = 10_000
"""Recordings that are kept of one tenant, or listed in one answer to ListRecordings: the newest."""
READERS_MAX = 4
"""Recordings that one tenant may read at one time."""

_log = structlog.get_logger(__name__)


class Recordings(Recorders):
    """Owns the directory of recordings, and the thread that writes them."""

    def __init__(self, directory: Path, on_fetch: Callable[[Principal, str, str], None] = lambda *_: None) -> None:
        """`on_fetch` is called with the caller, the session and its tenant before a recording is read."""
        self.held_bytes = 0  # of all recorders
        self._directory = directory
        self._on_fetch = on_fetch
        self._thread: ThreadPoolExecutor | None = None
        self._recorders: dict[str, Recorder] = {}  # of the sessions that go on
        self._ended: dict[str, About] = {}
        self._dirty: set[Recorder] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._readers: Counter[str] = Counter()
        self._stats = RecordingStats()

    # -- the daemon's life ---------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Finds the recordings of earlier daemons. Must be called before sessions are recovered."""
        for about in await asyncio.to_thread(_found, self._directory):
            self._ended[about.session_id] = about

    async def start(self) -> None:
        """Ends the recordings of sessions that did not come back, and begins to sweep."""
        now_s = time.time()
        for session_id, about in list(self._ended.items()):
            if about.end_time_s is None:
                rest = _with_end(about, now_s, "the daemon ended before the session did")
                await self._in_thread(_write_about, self._directory / session_id, rest)
                self._ended[session_id] = rest
        if self._ended:
            self._sweep_from_now_on()

    async def close(self) -> None:
        """Writes the rest. Does not end the recordings of sessions that the next daemon continues."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._write_now()
        for recorder in self._recorders.values():
            await self._in_thread(recorder.writer.release)
        if self._thread is not None:
            self._thread.shutdown()

    def stats(self) -> RecordingStats:
        live = [each.writer.size_bytes for each in self._recorders.values()]
        self._stats.kept = len(live) + len(self._ended)
        self._stats.kept_bytes = sum(live) + sum(each.size_bytes for each in self._ended.values())
        return self._stats

    # -- sessions ------------------------------------------------------------------------------------------------

    def recorder_of(self, session: Session, *, is_recovered: bool = False) -> Recorder | None:
        rules = session.spec.record
        about = self._ended.pop(session.session_id, None) if is_recovered else None
        is_known = about is not None
        if about is None:
            if rules.mode == "none":
                return None
            about = About(
                session_id=session.session_id,
                tenant=session.owner.tenant,
                mode=rules.mode,
                redact_tools=rules.redact_tools,
                retention_s=rules.retention_s,
                total_bytes=rules.total_bytes,
                create_time_s=time.time(),
            )
            self._stats.begun[rules.mode] += 1
            if is_recovered:  # the earlier daemon was killed before its first write, or the description is damaged
                _log.warning("recording_begun_late", session_id=session.session_id, tenant=session.owner.tenant)
        writer = RecordingWriter(RecordingFiles(self._directory / session.session_id), about, rules)
        recorder = self._recorders[session.session_id] = Recorder(writer, self)
        recorder.start(_head(session), is_recovered=is_recovered)
        if session.spec.network.any and not is_known:
            recorder.unseen("what hosts of the network answered")
        self._sweep_from_now_on()
        return recorder

    def recorder(self, session: Session) -> Recorder | None:
        """Returns the recorder of a session; None if it is not recorded."""
        return self._recorders.get(session.session_id)

    def upload(self, session: Session, *, keeps: bool = True) -> AbstractContextManager[RecordedUpload | NoUpload]:
        """Returns a block that records an upload to a session, if the session is recorded."""
        recorder = self._recorders.get(session.session_id)
        return nullcontext(NoUpload()) if recorder is None else recorder.upload(keeps=keeps)

    def on_end(self, recorder: Recorder) -> None:
        """Must be called when a session has ended."""
        session_id = recorder.writer.about.session_id
        del self._recorders[session_id]
        about = _with_end(recorder.writer.about, time.time(), recorder.writer.ended)
        self._ended[session_id] = replace(about, size_bytes=recorder.writer.size_bytes)

    # -- writing -------------------------------------------------------------------------------------------------

    def soon(self, recorder: Recorder) -> None:
        self._dirty.add(recorder)
        if self._writing is not None:
            return  # it looks again when it is done
        if recorder.new_bytes >= BATCH_BYTES:
            self._begin_writing()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_INTERVAL_S, self._begin_writing)

    def _begin_writing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        dirty, self._dirty = self._dirty, set()
        batches = [(recorder, *recorder.take()) for recorder in dirty]
        try:
            await self._in_thread(_write_all, [(recorder.writer, items) for recorder, items, _ in batches])
            for recorder, _, size_bytes in batches:
                recorder.wrote(size_bytes)
                self._after_write(recorder.writer)
        finally:
            self._writing = None
            for recorder in list(self._dirty):
                self.soon(recorder)

    def is_short_for(self, held_bytes: int) -> bool:
        return self.held_bytes > HELD_BYTES_TOTAL and held_bytes > HELD_BYTES_TOTAL // max(1, len(self._recorders))

    def _after_write(self, writer: RecordingWriter) -> None:
        if writer.failure:
            self._stats.ended_early[writer.failure] += 1
            writer.failure = ""
        if writer.about.end_time_s is not None and writer.about.session_id in self._ended:
            self._ended[writer.about.session_id] = writer.about

    async def _write_now(self) -> None:
        """Writes what was reported before this call."""
        for _ in range(2):  # a write that is under way may lack the last reports
            if not self._dirty and self._writing is None:
                return
            self._begin_writing()
            assert self._writing is not None, "it has just begun"
            await asyncio.shield(self._writing)

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "recordings", _make_directory, (self._directory,))
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    # -- removing ------------------------------------------------------------------------------------------------

    def _sweep_from_now_on(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    async def _sweep_for_ever(self) -> None:
        while True:
            self._cut_too_large()
            for session_id in self._overdue():
                del self._ended[session_id]
                await self._in_thread(_remove, self._directory / session_id)
            await asyncio.sleep(SWEEP_INTERVAL_S)

    def _cut_too_large(self) -> None:
        """Ends the recordings of live sessions that together exceed what all recordings of their tenant may have."""
        used = self._used()
        for recorder in list(self._recorders.values()):
            about = recorder.writer.about
            if used[about.tenant] > about.total_bytes:
                recorder.cut("the recordings of its tenant reached record.total_bytes", "size")

    def _used(self) -> Counter[str]:
        """Returns the bytes of each tenant's recordings of sessions that go on."""
        used = Counter[str]()
        for recorder in self._recorders.values():
            used[recorder.writer.about.tenant] += recorder.writer.size_bytes
        return used

    def _overdue(self) -> list[str]:
        """Returns ended recordings past their retention, and the oldest beyond the bytes or the number of a tenant."""
        now_s, used, kept = time.time(), self._used(), Counter[str]()
        live = (recorder.writer.about for recorder in self._recorders.values())
        limits: dict[str, tuple[float, int]] = {}  # of each tenant, as its last session had it
        for about in (*live, *self._ended.values()):
            limits[about.tenant] = max(limits.get(about.tenant, (0.0, 0)), (about.create_time_s, about.total_bytes))
        found = []
        for about in sorted(self._ended.values(), key=lambda each: -(each.end_time_s or now_s)):
            used[about.tenant] += about.size_bytes
            kept[about.tenant] += 1
            is_too_much = used[about.tenant] > limits[about.tenant][1] or kept[about.tenant] > RECORDINGS_MAX
            if is_too_much or (about.expire_time_s is not None and about.expire_time_s <= now_s):
                found.append(about.session_id)
                used[about.tenant] -= about.size_bytes
        return found

    # -- reading -------------------------------------------------------------------------------------------------

    def list(self, principal: Principal) -> list[service_pb.RecordingInfo]:
        """Returns the caller's recordings, the oldest first; all to an administrator."""
        live = [_info(each.writer.about, each.writer.size_bytes) for each in self._recorders.values()]
        infos = [*live, *(_info(about, about.size_bytes) for about in self._ended.values())]
        infos = [each for each in infos if principal.is_admin or each.tenant == principal.tenant]
        return sorted(infos, key=lambda each: each.create_time.ToNanoseconds())[-RECORDINGS_MAX:]

    def find(self, principal: Principal, session_id: str) -> About:
        """Returns the caller's recording of a session; of any tenant to an administrator. Raises NotFound."""
        recorder = self._recorders.get(session_id)
        about = recorder.writer.about if recorder is not None else self._ended.get(session_id)
        if about is None or not (principal.is_admin or about.tenant == principal.tenant):
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no recording of a session {session_id!r}")
        return about

    async def read(self, principal: Principal, about: About) -> AsyncGenerator[service_pb.GetRecordingResponse]:
        """Yields a recording as it is now. Raises ResourceExhausted, NotFound (it is being removed)."""
        with self._reading(principal.tenant):
            self._on_fetch(principal, about.session_id, about.tenant)
            await self._write_now()
            recorder = self._recorders.get(about.session_id)
            if recorder is None or recorder.writer.ended:  # a daemon before this one may have written all of it
                about, goes_on = self._ended.get(about.session_id, about), ""
                size_bytes = about.size_bytes if recorder is None else recorder.writer.size_bytes
                made = asyncio.to_thread(Snapshot.of_ended, self._directory / about.session_id)
            else:
                about, goes_on = recorder.writer.about, "the session had not ended when it was fetched"
                size_bytes, made = recorder.writer.size_bytes, self._in_thread(recorder.writer.snapshot)
            try:
                parts = _parts(await made, _info(about, size_bytes), about, goes_on)
                while (part := await asyncio.to_thread(next, parts, None)) is not None:
                    yield part
            except FileNotFoundError as error:
                why = about.ended or "it was removed meanwhile"
                text = f"the recording of session {about.session_id!r} can't be read: {why}"
                raise NotFound(Reason.SESSION_NOT_FOUND, text) from error

    @contextmanager
    def _reading(self, tenant: str) -> Iterator[None]:
        if self._readers[tenant] >= READERS_MAX:
            text = f"{READERS_MAX} recordings are being read, the most at one time; wait for one to end"
            raise ResourceExhausted(Reason.QUEUE_FULL, text, retry_after_s=1.0)
        self._readers[tenant] += 1
        try:
            yield
        finally:
            self._readers[tenant] -= 1
            if not self._readers[tenant]:
                del self._readers[tenant]


def _parts(
    snapshot: Snapshot, info: service_pb.RecordingInfo, about: About, goes_on: str
) -> Iterator[service_pb.GetRecordingResponse]:
    """Yields the messages of a recording: its description, entries, blobs, and what it lacks."""
    yield service_pb.GetRecordingResponse(recording=info)
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    ended, piece = about.ended or goes_on, bytearray()
    for kind, body in snapshot.records():
        if kind == ENTRY:
            piece += ENTRY_LENGTH.pack(len(body)) + body
            while len(piece) >= PIECE_BYTES:
                yield service_pb.GetRecordingResponse(entries=bytes(piece[:PIECE_BYTES]))
                del piece[:PIECE_BYTES]
        elif kind == ENDED:
            ended = body.decode("utf-8", "replace")
        else:
            counts[kind != REFERENCED][body.decode("utf-8", "replace")] += 1
    if piece:
        yield service_pb.GetRecordingResponse(entries=bytes(piece))
    for name in snapshot.blobs:
        for data in snapshot.blob_pieces(name, PIECE_BYTES):
            yield service_pb.GetRecordingResponse(blob_chunk=pb.BlobChunk(blob_id=name, data=data))
    counts[0]["messages of the model, which the daemon does not see"] += 1
    completeness = service_pb.RecordingCompleteness(ended=ended, redacted_tools=about.redact_tools)
    completeness.referenced.update(counts[0])
    completeness.unknown.update(counts[1])
    yield service_pb.GetRecordingResponse(completeness=completeness)


def _info(about: About, size_bytes: int) -> service_pb.RecordingInfo:
    return write(service_pb.RecordingInfo, about, size_bytes=size_bytes)


def _with_end(about: About, end_time_s: float, ended: str) -> About:
    return replace(about, end_time_s=end_time_s, ended=about.ended or ended)


def _head(session: Session) -> dict[str, Any]:
    """Returns the first entry: the session as the client's `SessionInfo` describes it."""
    spec, packages = session.spec, session.spec.sandbox.packages
    return {
        "session_id": session.session_id,
        "state": session.state,
        "generation": session.generation,
        "backend": session.backend_name,
        "image": spec.sandbox.image,
        "limits": vars(spec.limits),
        "authorized_imports": spec.authorized_imports,
        "python_version": session.python_version,
        "warm": session.warm,
        "labels": dict(spec.labels),
        "policy": vars(spec.policy),
        "denied_imports": spec.denied_imports,
        "workspace_imports": spec.workspace_imports,
        "refused_language": spec.refused_language,
        "network": spec.network.allowed,
        "denied_network": spec.network.denied,
        "packages": packages.requirements if packages is not None else (),
        "environment_id": session.environment_id,
        "node": session.node,
        "name": spec.name,
        "env_names": spec.env_names,
        "prelude": spec.prelude,
        "versions": {"remote_executor": version("remote-executor")},
    }


# ---------------------------------------------------------------------------------------------------------------------
# In threads


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:  # each recording will report it
        _log.warning("recordings_not_kept", directory=str(directory), reason=error.strerror)


def _write_all(batches: list[tuple[RecordingWriter, list[tuple[Any, ...]]]]) -> None:
    for writer, items in batches:
        writer.write(items)


def _found(directory: Path) -> list[About]:
    found = []
    for each in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            about = read_about(each)
            size_bytes = about.size_bytes or sum(file.stat().st_size for file in each.rglob("*"))
            found.append(replace(about, size_bytes=size_bytes))
        except (OSError, ValueError, TypeError) as error:
            _log.warning("recording_not_read", directory=str(each), reason=str(error))
    return found


def _write_about(directory: Path, about: About) -> None:
    try:
        RecordingFiles(directory).write_about(about)
    except OSError as error:
        _log.warning("recording_not_closed", session_id=about.session_id, reason=error.strerror)


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("recording_not_removed", directory=str(directory), reason=error.strerror)
