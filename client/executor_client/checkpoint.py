"""A checkpoint, the exported state of a session: bytes that only a daemon and a sandbox read.

The client never reads or runs their contents. A daemon restores states that it signed itself; its policy decides
whether it restores others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client._core import convert
from executor_client._core.limits import STATE_BYTES_MAX
from executor_client._core.local import LocalPath, NewFile
from executor_client.errors import InvalidRequest, ProtocolError
from executor_client.results import StateManifest


class Checkpoint(bytes):
    """The result of `export_state`, for `create_session(state=...)` of this daemon or of one with the same key.

    `manifest` lists its contents and what was omitted; None if it was loaded from a file or made from bytes.
    """

    manifest: StateManifest | None

    def __new__(cls, data: bytes = b"", manifest: StateManifest | None = None) -> Self:
        state = super().__new__(cls, data)
        state.manifest = manifest
        return state

    def save(self, path: LocalPath) -> None:
        """Saves it to a local file, whole or not at all. Raises OSError."""
        with NewFile(path) as file:
            file.write(self)
            file.commit()

    @classmethod
    def load(cls, path: LocalPath) -> Self:
        """Loads it from a local file. Raises OSError; InvalidRequest if the file is too large."""
        with Path(path).open("rb") as file:
            data = file.read(STATE_BYTES_MAX + 1)
        if len(data) > STATE_BYTES_MAX:
            raise InvalidRequest(f"{path} is larger than {STATE_BYTES_MAX} bytes, the limit of a state")
        return cls(data)

    def __repr__(self) -> str:
        """Returns one line, whatever the contents; `bytes(checkpoint)` shows the bytes."""
        if self.manifest is None:
            return f"<{type(self).__name__} of {len(self)} bytes>"
        names = self.manifest.variables
        return f"<{type(self).__name__} of {len(self)} bytes: {len(names)} variables, {self.manifest.files} files>"

    __str__ = __repr__  # the __str__ of bytes would print them all


class StateReader:
    """Takes the messages of one ExportState stream; `finish` returns the checkpoint."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._manifest: StateManifest | None = None

    def feed(self, message: pb.ExportStateResponse) -> None:
        """Takes a message. Raises ProtocolError for one that does not belong there, and past the limit."""
        if self._manifest is not None:
            raise ProtocolError("data arrived after the end of a state")
        if message.HasField("manifest"):
            self._manifest = convert.state_manifest_from_wire(message.manifest)
            return
        self._data += message.data
        if len(self._data) > STATE_BYTES_MAX:
            raise ProtocolError(f"a state has more than the accepted {STATE_BYTES_MAX} bytes")

    def finish(self) -> Checkpoint:
        """Returns the checkpoint. Raises ProtocolError when it has not arrived whole."""
        if self._manifest is None:
            raise ProtocolError("a state broke off")
        return Checkpoint(bytes(self._data), self._manifest)
