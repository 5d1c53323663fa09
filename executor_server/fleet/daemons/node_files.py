"""The files of a node of a fleet, in the folder `node` of its state directory.

`record.json` is the memory of its heartbeat (membership/heartbeat.py). `policy.toml`, `locks` and `state.key` are
the front's, as last in force, so that a restarted node continues with them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from executor_server.core.config import StateDir, StateDirError, private_files
from executor_server.fleet.membership import NodeRecord

BUILT_IN_POLICY = b'version = "built-in"\ndefault = "default"\n\n[profiles.default]\n'

_MAX_RECORD_BYTES = 64 * 1024


class NodeFiles:
    """Makes the folder when it is missing, with the policy of a node that has had no link yet."""

    def __init__(self, state_dir: StateDir) -> None:
        """Raises StateDirError."""
        self._folder = state_dir.node_path
        self.policy = self._folder / "policy.toml"
        self.state_key = self._folder / "state.key"
        self.locks = state_dir.node_locks_path
        self._record = self._folder / "record.json"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not self.policy.exists():
                private_files.write_private(self.policy, BUILT_IN_POLICY)
        except OSError as error:
            raise StateDirError(f"The folder {self._folder} can't be written: {error.strerror}.") from error

    def replace_locks(self, copies: Mapping[str, bytes]) -> dict[str, bytes]:
        """Replaces the copies of lock files, by their names. Returns those before. Raises OSError."""
        self.locks.mkdir(mode=0o700, exist_ok=True)
        before = {path.name: path.read_bytes() for path in self.locks.iterdir()}
        for name, content in copies.items():
            replace_file(self.locks / name, content)
        for name in before.keys() - copies.keys():
            (self.locks / name).unlink()
        return before

    def drop_policy(self) -> None:
        """Replaces the policy by the built-in one. Raises StateDirError."""
        try:
            private_files.write_private(self.policy, BUILT_IN_POLICY)
        except OSError as error:
            raise StateDirError(f"The file {self.policy} can't be written: {error.strerror}.") from error

    def read_record(self) -> NodeRecord:
        """Returns the record, or a new one if it is missing. Raises StateDirError if it is damaged."""
        try:
            data = self._record.read_bytes()[: _MAX_RECORD_BYTES + 1]
        except FileNotFoundError:
            return NodeRecord(instance=secrets.token_hex(16))
        except OSError as error:
            raise StateDirError(f"The file {self._record} can't be read: {error.strerror}.") from error
        try:
            return _record_of(json.loads(data))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StateDirError(
                f"The file {self._record} is damaged. Without it this node does not know which of its sessions were "
                f"lost. Remove the folder {self._folder}; the front then reports all of them lost."
            ) from error

    def write_record(self, record: NodeRecord) -> None:
        """Raises OSError, and the earlier record stays then."""
        private_files.write_private(self._record, json.dumps(asdict(record), indent=1).encode() + b"\n")


def _record_of(values: Mapping[str, Any]) -> NodeRecord:
    """Raises ValueError, TypeError."""
    record = NodeRecord(**values)
    if not isinstance(record.terms, dict):
        raise TypeError("terms is no object")
    texts = (record.instance, record.front_id, record.front_instance, *record.terms)
    numbers = (record.epoch, *record.terms.values())
    if not all(type(text) is str for text in texts) or not all(type(each) is int and each > 0 for each in numbers):
        raise ValueError("a field has another type")
    if not record.instance:
        raise ValueError("it has no instance")
    return record


def replace_file(path: Path, data: bytes) -> bytes | None:
    """Replaces a file. Returns what it had before; None where it was missing. Raises OSError."""
    before = path.read_bytes() if path.exists() else None
    if before != data:
        private_files.write_private(path, data)
    return before
