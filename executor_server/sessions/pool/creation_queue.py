"""The queue for making sandboxes; creations that wait with the same spec share a failure.

A backend that hangs takes long to fail. Without this, a caller behind others would wait for the failures of all of
them, one after the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from executor_server.core import BackendFull, ImageNotReady, SandboxFailure, SandboxSpec, SpecUnsupported
from executor_server.core.lifecycle import AdmissionController


class _Waiter:
    """One waiting creation, and the failure of another one of the same spec meanwhile."""

    def __init__(self) -> None:
        self.failure: SandboxFailure | None = None


class CreationQueue:
    """The waiting creations by spec; one for all sessions."""

    def __init__(self, admission: AdmissionController) -> None:
        self._admission = admission
        self._waiting: dict[SandboxSpec, set[_Waiter]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str, spec: SandboxSpec) -> AsyncIterator[None]:
        """Waits until the tenant may create a sandbox. Raises SandboxFailure if one of this spec failed meanwhile."""
        waiter = _Waiter()
        self._waiting.setdefault(spec, set()).add(waiter)
        try:
            async with self._admission.creation_turn(tenant):
                self._leave(spec, waiter)
                if waiter.failure is not None:
                    raise SandboxFailure(str(waiter.failure)) from waiter.failure
                yield
        except (ImageNotReady, BackendFull, SpecUnsupported):
            raise  # these fail at once, so the others may find out by themselves
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
