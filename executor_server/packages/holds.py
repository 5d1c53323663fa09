"""The sandboxes that have an environment: one empty file each, whose name has all the facts.

The file is created before the environment is mounted and removed after the sandbox is gone. So a killed daemon may
leave one hold too many, never one too few; the next daemon's backends report the sandboxes that they adopted. Files
instead of database rows, since a damaged file can only lose its whole name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import structlog

from executor_server.core import SandboxFailure

_PART = re.compile(r"[A-Za-z0-9_-]{1,64}")

_log = structlog.get_logger(__name__)


class _Hold(NamedTuple):
    backend: str
    sandbox_id: str
    environment_id: str

    @property
    def file_name(self) -> str:
        return ".".join(self)


class Holds:
    """For the event loop; each change is one system call."""

    def __init__(self, directory: Path) -> None:
        """Reads those of earlier daemons. Raises OSError."""
        self._directory = directory
        self._of_sandbox: defaultdict[str, set[_Hold]] = defaultdict(set)
        self._counts: Counter[str] = Counter()
        for path in directory.iterdir():
            parts = path.name.split(".")
            if len(parts) == len(_Hold._fields) and all(_PART.fullmatch(part) for part in parts):
                self._note(_Hold(*parts))
            else:
                _log.error("environment_hold_rejected", name=path.name)
                path.unlink()

    def count(self, environment_id: str) -> int:
        """Returns how many sandboxes have an environment."""
        return self._counts[environment_id]

    def of(self, sandbox_id: str) -> str:
        """Returns the environment of a sandbox; empty without one."""
        return min((hold.environment_id for hold in self._of_sandbox.get(sandbox_id, ())), default="")

    def add(self, environment_id: str, backend: str, sandbox_id: str) -> None:
        """Adds a hold. Idempotent. Raises SandboxFailure if it can't be written."""
        hold = _Hold(backend, sandbox_id, environment_id)
        if hold in self._of_sandbox.get(sandbox_id, ()):
            return
        if not all(_PART.fullmatch(part) for part in hold):
            raise SandboxFailure(f"{sandbox_id!r} of backend {backend!r} is not a valid sandbox id")
        try:
            (self._directory / hold.file_name).touch(mode=0o600)
        except OSError as error:
            raise SandboxFailure(f"the use of environment {environment_id} can't be recorded: {error}") from error
        self._note(hold)

    def release(self, sandbox_id: str) -> list[str]:
        """Removes a sandbox's holds, and returns their environments; none for an unknown sandbox."""
        holds = self._of_sandbox.pop(sandbox_id, set())
        for hold in holds:
            self._counts[hold.environment_id] -= 1
            try:
                (self._directory / hold.file_name).unlink(missing_ok=True)
            except OSError as error:  # it holds again after the next start, until `keep_only`
                _log.error("environment_hold_not_removed", environment_id=hold.environment_id, error=str(error))
        return [hold.environment_id for hold in holds]

    def keep_only(self, backend: str, sandbox_ids: Collection[str]) -> list[str]:
        """Releases all other sandboxes of a backend, and returns their environments."""
        kept = set(sandbox_ids)
        others = [
            sandbox_id
            for sandbox_id, holds in self._of_sandbox.items()
            if sandbox_id not in kept and any(hold.backend == backend for hold in holds)
        ]
        return [environment_id for sandbox_id in others for environment_id in self.release(sandbox_id)]

    def _note(self, hold: _Hold) -> None:
        self._of_sandbox[hold.sandbox_id].add(hold)
        self._counts[hold.environment_id] += 1
