"""Bytes that come and go beside the jobs: staged blobs, and files of the workspace.

The supervisor serves them itself, at any time, so a program that hangs keeps nobody from its files. Nothing blocks:
both live in memory (memory files, tmpfs), in pieces of one chunk.
"""

from __future__ import annotations

import os
import time

from . import archives, link, workspace
from .channel import Channel
from .frames import CHUNK_BYTES, Fields, FrameError, Kind
from .lean import dumps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Union

MAX_BLOBS = 64
MAX_TRANSFERS = 16
# Everything staged at one time, and one value on its way out.
MAX_BLOB_BYTES = 256 * 1024 * 1024
# For a blob to be completed, and then to be named by a message; only time with a daemon counts.
BLOB_TIME_S = 60.0
_LISTING_BYTES = 1024 * 1024


class _Blob:
    def __init__(self, size: int, deadline: float) -> None:
        self.fd = os.memfd_create("blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = size
        self.received = 0
        self.deadline = deadline  # by the clock of `Transfers`


class Transfers:
    """Owns the staged blobs and the files on their way. `on_file` is told of each file that was put."""

    def __init__(self, channel: Channel, root: str) -> None:
        self._channel = channel
        self._root = root
        self._blobs: dict[str, _Blob] = {}
        self._uploads: dict[int, Union[workspace.Upload, archives.ArchiveUpload]] = {}
        self._downloads: dict[int, Union[workspace.Download, archives.ArchiveDownload]] = {}
        self._serial = 0
        self.on_file: Callable[[str, os.stat_result], None] = lambda _path, _status: None
        # Stands still while there is no daemon, which could neither complete a blob nor name it.
        self._connected_s = 0.0
        self._looked_at = time.monotonic()
        self._was_connected = False

    def close_all(self) -> None:
        """In a forked child that must not have them."""
        for blob in self._blobs.values():
            os.close(blob.fd)
        for upload in self._uploads.values():
            upload.close()
        for download in self._downloads.values():
            download.close()

    def on_new_daemon(self) -> None:
        """Drops the files that were on their way when the last daemon died; nobody will go on with them.

        Staged blobs stay: a message of the last daemon's, sent again by the new one, may name them.
        """
        for upload in self._uploads.values():
            upload.abandon()
        self._uploads.clear()
        for download in self._downloads.values():
            download.close()
        self._downloads.clear()

    # -- blobs ---------------------------------------------------------------------------------------------------

    def begin_blob(self, head: Fields) -> None:
        op, blob_id = head.integer("op"), head.text("blob", 64)
        size = head.integer("size", 0)
        staged = sum(blob.size for blob in self._blobs.values())
        if blob_id in self._blobs or len(self._blobs) >= MAX_BLOBS or staged + size > MAX_BLOB_BYTES:
            limit = f"at most {MAX_BLOBS} blobs and {MAX_BLOB_BYTES} bytes can be staged at a time"
            self._channel.fail(op, "too_large", limit)
            return
        self._blobs[blob_id] = _Blob(size, self._connected_s + BLOB_TIME_S)
        self._channel.done(op)

    def add_to_blob(self, head: Fields, data: memoryview) -> None:
        blob = self._blobs.get(head.text("blob", 64))
        if blob is None:
            return
        if blob.received + len(data) > blob.size:
            raise FrameError("more blob data than announced")
        try:
            blob.received += os.write(blob.fd, data)
        except OSError:
            # No memory, or larger than a file may be here. Who names it is told that it is not there.
            self.drop_blob(head.text("blob", 64))
            return
        blob.deadline = self._connected_s + BLOB_TIME_S

    def drop_blob(self, blob_id: str) -> None:
        """Lets go of a blob that nobody will name."""
        blob = self._blobs.pop(blob_id, None)
        if blob is not None:
            os.close(blob.fd)

    def claim_blob(self, blob_id: str) -> None:
        """A message that waits for its turn names it: it must not expire meanwhile."""
        blob = self._blobs.get(blob_id)
        if blob is not None:
            blob.deadline = float("inf")

    def expire_blobs(self, now: float) -> None:
        """To be called in each turn of the loop, of which one ends whenever a daemon comes or goes."""
        if self._was_connected:
            self._connected_s += now - self._looked_at
        self._looked_at, self._was_connected = now, self._channel.connected
        for blob_id, blob in list(self._blobs.items()):
            if blob.deadline <= self._connected_s:
                self.drop_blob(blob_id)

    def take_blob(self, blob_id: str) -> Optional[int]:
        """The descriptor of a complete blob, sealed; it is the caller's. None when there is none."""
        blob = self._blobs.pop(blob_id, None)
        if blob is None:
            return None
        if blob.received != blob.size:
            os.close(blob.fd)
            return None
        link.seal(blob.fd)
        return blob.fd

    # -- files ---------------------------------------------------------------------------------------------------

    def begin_file(self, kind: int, head: Fields) -> None:
        op, path = head.integer("op"), head.text("path", workspace.MAX_PATH_CHARS + 1)
        try:
            if kind == Kind.FILE_LIST:
                self._list(op, path)
            elif len(self._uploads) + len(self._downloads) >= MAX_TRANSFERS:
                self._channel.fail(op, "too_large", f"at most {MAX_TRANSFERS} files can be transferred at a time")
            elif kind == Kind.FILE_GET:
                download = self._download(path, head)
                self._downloads[op] = download
                self._channel.send(Kind.FILE_CHUNK, {"op": op, "file": download.info})
            else:
                self._uploads[op] = self._upload(path, head)
                self.add_to_file(head, memoryview(b""))
        except workspace.PathRefused as refused:
            self._refuse(op, refused)

    def _download(self, path: str, head: Fields) -> Union[workspace.Download, archives.ArchiveDownload]:
        make = archives.ArchiveDownload if head.boolean("tar", default=False) else workspace.Download
        return make(self._root, path, head.integer("max_bytes"))

    def _upload(self, path: str, head: Fields) -> Union[workspace.Upload, archives.ArchiveUpload]:
        size = head.integer("size")
        if not head.boolean("tar", default=False):
            return workspace.Upload(self._root, path, size, self._next_serial())
        upload = archives.ArchiveUpload(self._root, path, size, self._next_serial)
        upload.on_file = self.on_file
        return upload

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _list(self, op: int, path: str) -> None:
        entries, truncated = workspace.list_files(self._root, path)
        listed: list[bytes] = []
        left = _LISTING_BYTES
        for entry in entries:  # each by itself: a name can take twelve bytes a character
            listed.append(dumps(entry))
            left -= len(listed[-1]) + 1
            if left < 0:
                listed.pop()
                truncated = True
                break
        self._channel.done(op, b"[" + b",".join(listed) + b"]", truncated=truncated)

    def add_to_file(self, head: Fields, data: memoryview) -> None:
        op = head.integer("op")
        upload = self._uploads.get(op)
        if upload is None:
            return  # it failed, and the daemon has been told
        try:
            if head.boolean("abandon", default=False):
                upload.abandon()
            else:
                upload.write(data)
                if upload.remaining:
                    return
                self._channel.done(op, file=upload.finish())
                if isinstance(upload, workspace.Upload):
                    self.on_file(upload.path, upload.status)
        except workspace.PathRefused as refused:
            upload.abandon()
            self._refuse(op, refused)
        del self._uploads[op]

    @property
    def busy(self) -> bool:
        """Whether `pump` has something to send that the daemon would take."""
        return bool(self._downloads) and not self._channel.full

    def pump(self) -> None:
        """Sends a piece of each file that is on its way out, if the daemon takes it; then it is others' turn."""
        for op, download in list(self._downloads.items()):
            if self._channel.full:
                return
            try:
                data = download.read(CHUNK_BYTES)
            except workspace.PathRefused as refused:
                self._end_download(op)
                self._refuse(op, refused)
                continue
            if data:
                self._channel.send(Kind.FILE_CHUNK, {"op": op}, data)
            else:
                self._end_download(op)
                self._channel.done(op, _left_out(download))

    def _end_download(self, op: int) -> None:
        self._downloads.pop(op).close()

    def _refuse(self, op: int, refused: workspace.PathRefused) -> None:
        self._channel.fail(op, refused.reason, str(refused))


def _left_out(download: Union[workspace.Download, archives.ArchiveDownload]) -> bytes:
    """What an archive holds, and what it could not hold."""
    if isinstance(download, workspace.Download):
        return b""
    said = {"files": download.files, "bytes": download.file_bytes, "omitted": download.omitted}
    return dumps(said)
