"""Transfers: staged blobs, and files of the sandbox, with the other requests about files.

The supervisor serves them itself, at any time, so a hanging program does not lock its files away. Nothing blocks for
long: all but the image's own files is in memory (memory files, tmpfs), and everything moves in pieces of one chunk.
"""

from __future__ import annotations

import os
import time

from executor_api.limits import BLOB_BYTES_MAX, EXCLUDED_MAX, PATH_BYTES_MAX, VARIABLES_NAMED_MAX

from ..wire import link
from ..wire.frames import CHUNK_BYTES, FrameError
from ..wire.guest_channel import Channel
from ..wire.lean import dumps
from ..wire.messages import BlobBegin, BlobData, FileChunk, FileData, FileGet, FileList, FilePut, ManageFile
from ..wire.schema import read_texts
from . import workspace
from .paths import PathRefused, resolve

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

    from . import archives
    from .management import Removal

MAX_BLOBS = VARIABLES_NAMED_MAX  # one message may name as many; each is a descriptor
MAX_TRANSFERS = 16
# Bytes of all blobs staged at a time, and of one value.
MAX_BLOB_BYTES = BLOB_BYTES_MAX
# Seconds without a piece of any blob after which those that no message has named expire; only time with a daemon
# counts. A message may name several, and the first has to wait for the last.
BLOB_TIME_S = 60.0
_LISTING_BYTES = 1024 * 1024


class _Blob:
    def __init__(self, size: int, now: float) -> None:
        """Raises OSError."""
        self.fd = os.memfd_create("blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = size
        self.received = 0
        self.renewed = now  # the time of its last piece, by the clock of `Transfers`
        self.claimed = False


class Transfers:
    """Owns the staged blobs and the files in transfer. `on_file` is called for each file that was put."""

    def __init__(self, channel: Channel, root: str, on_file: Callable[[str, os.stat_result], None]) -> None:
        self._channel = channel
        self._root = root
        self._blobs: dict[str, _Blob] = {}
        self._uploads: dict[int, Union[workspace.Upload, archives.ArchiveUpload]] = {}
        self._downloads: dict[int, Union[workspace.Download, archives.ArchiveDownload]] = {}
        self._removals: dict[int, Removal] = {}
        self._on_file = on_file
        # A clock that stops without a daemon: nothing can complete or name a blob then.
        self._connected_s = 0.0
        self._blobs_renewed = 0.0  # the time of the last piece of any blob, by this clock
        self._looked_at = time.monotonic()
        self._was_connected = False

    def close_all(self) -> None:
        """Closes all transfers without telling the daemon."""
        for blob in self._blobs.values():
            os.close(blob.fd)
        for upload in self._uploads.values():
            upload.close()
        for reading in (*self._downloads.values(), *self._removals.values()):
            reading.close()

    def on_new_daemon(self) -> None:
        """Drops the last daemon's file transfers, which the new one does not know.

        Staged blobs stay: the new daemon may repeat a message that names them.
        """
        for upload in self._uploads.values():
            upload.abandon()
        self._uploads.clear()
        for reading in (*self._downloads.values(), *self._removals.values()):
            reading.close()
        self._downloads.clear()
        self._removals.clear()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def begin_blob(self, request: BlobBegin) -> None:
        op, blob_id, size = request.op, request.blob, request.size
        if blob_id not in self._blobs and not self._has_room(size):
            self._drop_unused()
        if blob_id in self._blobs or not self._has_room(size):
            limit = f"at most {MAX_BLOBS:,} values and {MAX_BLOB_BYTES:,} bytes may wait for their use at a time"
            self._channel.fail(op, "too_large", f"{limit}; send fewer, or wait for the use of those sent before")
            return
        try:
            self._blobs[blob_id] = _Blob(size, self._connected_s)
        except OSError as error:
            self._channel.fail(op, "too_large", f"the sandbox can't hold another value: {error.strerror}")
            return
        self._blobs_renewed = self._connected_s
        self._channel.done(op)

    def _has_room(self, size: int) -> bool:
        staged = sum(blob.size for blob in self._blobs.values())
        return len(self._blobs) < MAX_BLOBS and staged + size <= MAX_BLOB_BYTES

    def _drop_unused(self) -> None:
        """Drops blobs that only others kept from expiring: nothing may ever name them."""
        for blob_id, blob in list(self._blobs.items()):
            if not blob.claimed and blob.renewed + BLOB_TIME_S <= self._connected_s:
                self.drop_blob(blob_id)

    def add_to_blob(self, piece: BlobData, data: memoryview) -> None:
        blob = self._blobs.get(piece.blob)
        if blob is None:
            return
        if blob.received + len(data) > blob.size:
            raise FrameError("more blob data than announced")
        try:
            blob.received += os.write(blob.fd, data)
        except OSError:
            # No memory, or past RLIMIT_FSIZE. The message that names the blob gets blob_not_found.
            self.drop_blob(piece.blob)
            return
        blob.renewed = self._blobs_renewed = self._connected_s

    def drop_blob(self, blob_id: str) -> None:
        """Drops a blob that no message will name."""
        blob = self._blobs.pop(blob_id, None)
        if blob is not None:
            os.close(blob.fd)

    def claim_blob(self, blob_id: str) -> None:
        """Keeps a blob from expiring: a waiting job names it, and drops it when it has begun."""
        blob = self._blobs.get(blob_id)
        if blob is not None:
            blob.claimed = True

    def expire_blobs(self, now: float) -> None:
        """Drops expired blobs. To be called in each turn of the loop; a turn ends when a daemon connects or leaves."""
        if self._was_connected:
            self._connected_s += now - self._looked_at
        self._looked_at, self._was_connected = now, self._channel.connected
        if self._blobs and self._blobs_renewed + BLOB_TIME_S <= self._connected_s:
            self._drop_unused()

    def take_blob(self, blob_id: str) -> Optional[int]:
        """Returns the sealed descriptor of a complete blob, which the caller owns; None if there is none."""
        blob = self._blobs.pop(blob_id, None)
        if blob is None:
            return None
        if blob.received != blob.size:
            os.close(blob.fd)
            return None
        link.seal(blob.fd)
        return blob.fd

    # -- files ---------------------------------------------------------------------------------------------------

    def begin_file(self, request: Union[FilePut, FileGet, FileList, ManageFile], body: bytes = b"") -> None:
        op = request.op
        try:
            if isinstance(request, FileList):
                self._list(request)
            elif len(self._uploads) + len(self._downloads) + len(self._removals) >= MAX_TRANSFERS:
                self._channel.fail(op, "queue_full", f"at most {MAX_TRANSFERS} files can be transferred at a time")
            elif isinstance(request, FileGet):
                download = self._download(request, body)
                self._downloads[op] = download
                self._channel.send(FileChunk(op=op, file=download.info))
            elif isinstance(request, FilePut):
                self._uploads[op] = self._upload(request)
                self.add_to_file(FileData(op=op), memoryview(b""))
            else:
                self._manage(request)
        except PathRefused as refused:
            self._refuse(op, refused)

    def _download(self, request: FileGet, body: bytes) -> Union[workspace.Download, archives.ArchiveDownload]:
        place = resolve(self._root, request.path)
        if request.tar:
            excluded = read_texts(body, EXCLUDED_MAX, PATH_BYTES_MAX, "excluded") if body else ()
            download: archives.ArchiveDownload = _archives().ArchiveDownload(
                place, request.max_bytes, frozenset(excluded)
            )
            return download
        with place:
            return workspace.Download(place, request.max_bytes, offset=request.offset, length=request.length)

    def _upload(self, request: FilePut) -> Union[workspace.Upload, archives.ArchiveUpload]:
        place = resolve(self._root, request.path, create=True)
        if not request.tar:
            return workspace.Upload(place, request.size, append=request.append, mode=request.mode)
        upload: archives.ArchiveUpload = _archives().ArchiveUpload(place, request.size)
        upload.on_file = self._note
        return upload

    def _note(self, upload: workspace.Upload) -> None:
        """Notes a file that was put into the workspace."""
        path = upload.place.path
        if path.startswith(f"{self._root}/"):
            self._on_file(path[len(self._root) + 1 :], upload.status)

    def _manage(self, request: ManageFile) -> None:
        from . import management  # few sessions need it

        made = management.manage(self._root, request)
        if isinstance(made, management.Removal):
            self._removals[request.op] = made
        else:
            self._channel.done(request.op, file=made)

    def _list(self, request: FileList) -> None:
        incomplete = False

        def leave_out(_path: str, why: str) -> None:
            nonlocal incomplete
            incomplete = incomplete or why in (workspace.NOT_TEXT, workspace.UNREADABLE, workspace.TOO_DEEP)

        with resolve(self._root, request.path) as place:
            entries, truncated = workspace.list_files(place, leave_out, recursive=request.recursive)
            prefix = place.asked if place.asked in ("", "/") else f"{place.asked}/"
        listed: list[bytes] = []
        left = _LISTING_BYTES
        for entry in entries:  # one by one: a character of a name can take twelve bytes
            path = prefix + entry.path
            if len(path) > PATH_BYTES_MAX:
                truncated = True
                continue
            listed.append(dumps({**entry.head(), "path": path}))
            left -= len(listed[-1]) + 1
            if left < 0:
                listed.pop()
                truncated = True
                break
        self._channel.done(request.op, b"[" + b",".join(listed) + b"]", truncated=truncated or incomplete)

    def add_to_file(self, piece: FileData, data: memoryview) -> None:
        op = piece.op
        upload = self._uploads.get(op)
        if upload is None:
            if piece.abandon and op in self._downloads:
                self._end_download(op)
            return  # or it failed, and the daemon has the error
        try:
            if piece.abandon:
                upload.abandon()
            else:
                upload.write(data)
                if upload.remaining:
                    return
                self._channel.done(op, file=upload.finish())
                if isinstance(upload, workspace.Upload):
                    self._note(upload)
        except PathRefused as refused:
            upload.abandon()
            self._refuse(op, refused)
        del self._uploads[op]

    @property
    def busy(self) -> bool:
        """True when `pump` has something to send and the daemon accepts it."""
        return bool(self._downloads or self._removals) and not self._channel.full

    def pump(self) -> None:
        """Takes a step of each removal and sends a piece of each download, as long as the daemon accepts them."""
        for op, removal in list(self._removals.items()):
            try:
                if not removal.step():
                    continue
                self._channel.done(op)
            except PathRefused as refused:
                self._refuse(op, refused)
            self._removals.pop(op).close()
        for op, download in list(self._downloads.items()):
            if self._channel.full:
                return
            try:
                data = download.read(CHUNK_BYTES)
            except PathRefused as refused:
                self._end_download(op)
                self._refuse(op, refused)
                continue
            if data:
                self._channel.send(FileChunk(op=op), data)
            else:
                self._end_download(op)
                self._channel.done(op, _left_out(download))

    def _end_download(self, op: int) -> None:
        self._downloads.pop(op).close()

    def _refuse(self, op: int, refused: PathRefused) -> None:
        self._channel.fail(op, refused.reason, str(refused))


def _archives() -> Any:
    """Imports the module at its first use, since few sessions need it.

    Agent code can't change the module: the guest's archive is mounted read-only, and no other path is searched.
    """
    from . import archives

    return archives


def _left_out(download: Union[workspace.Download, archives.ArchiveDownload]) -> bytes:
    """Returns what an archive contains and leaves out, as JSON."""
    if isinstance(download, workspace.Download):
        return b""
    said = {"files": download.files, "bytes": download.file_bytes, "omitted": download.omitted}
    return dumps(said)
