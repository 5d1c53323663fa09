"""Turns at having a sandbox made, in which those who wait for the same share a failure.

A backend that hangs takes its time to fail. Without this, whoever waits for a turn behind others would wait for the
failures of all of them, one after the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from executor_server.errors import BackendFull, ImageNotReady, SandboxFailure
from executor_server.gate import Gate
from executor_server.model import SandboxSpec


class _Waiter:
    """Who waits, and what has failed meanwhile for somebody who waited for the same."""

    def __init__(self) -> None:
        self.failure: SandboxFailure | None = None


class CreationTurns:
    """Owned by whoever owns the sessions."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waiting: dict[SandboxSpec, set[_Waiter]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str, spec: SandboxSpec) -> AsyncIterator[None]:
        """Waits for the tenant's turn to have this made. Raises SandboxFailure when that failed while it waited."""
        waiter = _Waiter()
        self._waiting.setdefault(spec, set()).add(waiter)
        try:
            async with self._gate.creation_turn(tenant):
                self._leave(spec, waiter)
                if waiter.failure is not None:
                    raise SandboxFailure(str(waiter.failure)) from waiter.failure
                yield
        except (ImageNotReady, BackendFull):
            raise  # whether an image is there, or a place, is found out at once
        except SandboxFailure as failure:
            for other in self._waiting.get(spec, ()):
                other.failure = failure
            raise
        finally:
            self._leave(spec, waiter)

    def _leave(self, spec: SandboxSpec, waiter: _Waiter) -> None:
        waiting = self._waiting.get(spec, set())
        waiting.discard(waiter)
        if not waiting:
            self._waiting.pop(spec, None)
