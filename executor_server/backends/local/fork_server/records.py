"""Records of fork servers in the state directory, through which a later daemon finds one that outlived its daemon.

A fork server without sandboxes ends at once when its daemon dies. One that is stopped, or stuck in the kernel, does
not; and one with sandboxes lives as long as they do.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from executor_server.backends.local.descriptors import is_readable, kill
from executor_server.backends.local.records import ProcessRecord, open_recorded

_DIRECTORY = "fork_servers"
_NAME = re.compile(r"([0-9a-f]{16})\.json")
_RECORD_BYTES = 4096


@dataclass(frozen=True)
class OrphanedForkServer:
    """The first process of a fork server that another daemon started."""

    fork_server_id: str
    pidfd: int

    def has_ended(self) -> bool:
        return is_readable(self.pidfd)

    def kill(self) -> None:
        kill(self.pidfd)

    def release(self) -> None:
        os.close(self.pidfd)


class ForkServerRecords:
    """A file for each fork server, made when its first process is known and removed when that has ended."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / _DIRECTORY

    def write(self, fork_server_id: str, init: ProcessRecord) -> None:
        """Raises OSError."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(self._path(fork_server_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(init), file)

    def remove(self, fork_server_id: str) -> None:
        self._path(fork_server_id).unlink(missing_ok=True)

    def orphans(self) -> list[OrphanedForkServer]:
        """Returns the recorded fork servers that live, and removes the records of the others. Raises OSError."""
        try:
            names = os.listdir(self._directory)  # noqa: PTH208 - names only
        except FileNotFoundError:
            return []
        found = []
        for name in names:
            matched = _NAME.fullmatch(name)
            if matched is None:
                continue
            pidfd = self._open(matched[1])
            if pidfd is None:
                self.remove(matched[1])
            else:
                found.append(OrphanedForkServer(matched[1], pidfd))
        return found

    def _open(self, fork_server_id: str) -> int | None:
        try:
            with self._path(fork_server_id).open("rb") as file:
                values = json.loads(file.read(_RECORD_BYTES))
            recorded = ProcessRecord(int(values["pid"]), int(values["start_time"]), str(values["boot_id"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None  # the daemon died while it wrote: the fork server had no sandbox yet
        return open_recorded(recorded)

    def _path(self, fork_server_id: str) -> Path:
        return self._directory / f"{fork_server_id}.json"
