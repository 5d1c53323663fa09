"""The file of certificate authorities that sandboxes with a network get; the egress proxy writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from executor_server.core import SandboxFailure


class EgressBundle:
    """Asks for the file: the first time in a thread, since it may have to be made, later without."""

    def __init__(self, find: Callable[[], Path] | None) -> None:
        """`find` returns the file, whose path changes with its content, or raises SandboxFailure; None: no proxy."""
        self._find = find
        self._was_found = False

    async def path(self) -> Path:
        """Returns the file as it is now. Raises SandboxFailure."""
        if self._find is None:
            raise SandboxFailure("no egress proxy runs, which a sandbox with a network needs")
        if self._was_found:
            return self._find()
        found = await asyncio.to_thread(self._find)
        self._was_found = True
        return found
