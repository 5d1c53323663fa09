"""The probe of the E2B backend: a double of the cloud in the test's own event loop, with real machines of this host.

A module of its own, since it needs the SDK and aiohttp, which a host without that backend may lack.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import psutil

from executor_server.backends.base import Backend
from executor_server.backends.e2b import E2BBackend
from executor_server.backends.e2b.sandbox import SANDBOX_KEY
from executor_server.backends.e2b.sandbox_factory import DAEMON_KEY
from executor_server.sessions import Session
from tests.contract.probes import FULL_AT, MISSING, PAUSE_IDLE_S, STRAY_ID, RealProbe, pid_inside
from tests.support.e2b import Double, e2b_section

TEMPLATE = "code-interpreter-v1"
_NO_LISTENER = "http://127.0.0.1:9"


class E2BProbe(RealProbe):
    """Machines of the double, by the sandbox that their metadata name."""

    name = "e2b"

    def __init__(self, directory: Path, double: Double, stack: AsyncExitStack) -> None:
        super().__init__(directory)
        self.double = double
        self.section = e2b_section(double)
        self._stack = stack

    @classmethod
    async def open(cls, directory: Path) -> E2BProbe:
        stack = AsyncExitStack()
        return cls(directory, await stack.enter_async_context(Double()), stack)

    async def aclose(self) -> None:
        await self._stack.aclose()

    def small(self) -> Backend:
        return E2BBackend(self.state_dir, e2b_section(self.double, max_sandboxes=FULL_AT))

    def pausing(self) -> Backend:
        return E2BBackend(self.state_dir, e2b_section(self.double, pause_idle_s=PAUSE_IDLE_S))

    def with_lost_image(self) -> Backend:
        images = {"base": TEMPLATE, MISSING: "deleted-since"}
        return E2BBackend(self.state_dir, e2b_section(self.double, images=images))

    def lose_image(self) -> None:
        return  # the account never had the template

    def without_host(self) -> Backend:
        away = {"api_url": _NO_LISTENER, "sandbox_url": _NO_LISTENER}
        return E2BBackend(self.state_dir, e2b_section(self.double, **away))

    async def existing(self) -> set[str]:
        return {sandbox.metadata[SANDBOX_KEY] for sandbox in self.double.sandboxes.values()}

    async def make_stray(self) -> None:
        daemon_id = (self.state_dir / "e2b" / ".lock").read_text()
        metadata = {DAEMON_KEY: daemon_id, SANDBOX_KEY: STRAY_ID}
        await self.double.create({"templateID": TEMPLATE, "timeout": 300, "metadata": metadata})

    async def kill(self, sandbox_id: str) -> None:
        await self.double.vanish(self._machine_id(sandbox_id))

    def supervisor(self, session: Session) -> psutil.Process:
        """Returns the innermost of those processes of its machine that are the first of a pid namespace."""
        machine = self.double.sandboxes[self._machine_id(session._sandbox.sandbox_id)].machine
        assert machine.first_pid is not None
        numbers = {each: pid_inside(each) for each in psutil.Process(machine.first_pid).children(recursive=True)}
        firsts = [each for each, inside in numbers.items() if inside[-1] == 1]
        return max(firsts, key=lambda each: len(numbers[each]))

    def _machine_id(self, sandbox_id: str) -> str:
        (found,) = (
            machine_id
            for machine_id, sandbox in self.double.sandboxes.items()
            if sandbox.metadata.get(SANDBOX_KEY) == sandbox_id
        )
        return found
