"""A checkpoint, the saved state of a session: bytes that nobody but a daemon and a sandbox looks into.

Nothing here reads what is in them, and nothing of them is run, whoever they came from. A daemon restores what it has
signed itself; what else it restores, its policy says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from executor_api.v1 import executor_service_pb2 as pb
from executor_client import _convert
from executor_client._limits import STATE_BYTES_MAX
from executor_client._local import LocalPath, NewFile
from executor_client.errors import InvalidRequest, ProtocolError
from executor_client.results import StateManifest


class Checkpoint(bytes):
    """What `export_state` gave: for `create_session(state=...)`, of this daemon or of one with the same key.

    `manifest` says what is in it and what is not; None when it was loaded from a file, or made of other bytes.
    """

    manifest: StateManifest | None

    def __new__(cls, data: bytes = b"", manifest: StateManifest | None = None) -> Self:
        state = super().__new__(cls, data)
        state.manifest = manifest
        return state

    def save(self, path: LocalPath) -> None:
        """Writes it to a local file, which is there whole or not at all. Raises OSError."""
        with NewFile(path) as file:
            file.write(self)
            file.commit()

    @classmethod
    def load(cls, path: LocalPath) -> Self:
        """Reads it from a local file. Raises OSError, and InvalidRequest for one that is too large."""
        with Path(path).open("rb") as file:
            data = file.read(STATE_BYTES_MAX + 1)
        if len(data) > STATE_BYTES_MAX:
            raise InvalidRequest(f"{path} has more than the {STATE_BYTES_MAX} bytes of the largest state")
        return cls(data)

    def __repr__(self) -> str:
        """One line, whatever is in it; `bytes(checkpoint)` shows the bytes."""
        if self.manifest is None:
            return f"<{type(self).__name__} of {len(self)} bytes>"
        names = self.manifest.variables
        return f"<{type(self).__name__} of {len(self)} bytes: {len(names)} variables, {self.manifest.files} files>"

    __str__ = __repr__  # that of bytes prints them all, and so would print() and an f-string


class StateReader:
    """Feed it the messages of one ExportState stream, and `finish`."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._manifest: StateManifest | None = None

    def feed(self, message: pb.ExportStateResponse) -> None:
        """Raises ProtocolError for what does not belong to one, and for more than is accepted."""
        if self._manifest is not None:
            raise ProtocolError("a state went on after its end")
        if message.HasField("manifest"):
            self._manifest = _convert.state_manifest_from_wire(message.manifest)
            return
        self._data += message.data
        if len(self._data) > STATE_BYTES_MAX:
            raise ProtocolError(f"a state has more than the accepted {STATE_BYTES_MAX} bytes")

    def finish(self) -> Checkpoint:
        """Raises ProtocolError when it is not whole."""
        if self._manifest is None:
            raise ProtocolError("a state broke off")
        return Checkpoint(bytes(self._data), self._manifest)
