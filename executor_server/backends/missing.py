"""The sandbox of a session that has lost its own: it stands where one is expected, and has no guest."""

from __future__ import annotations

from pathlib import Path

from executor_server.backends.base import PassiveSandbox
from executor_server.backends.channel import SocketEndpoint


class MissingSandbox(PassiveSandbox):
    """Implements `Sandbox`. `reason` is a clause for its owner, as `cause_of_death` is; empty when it is not known."""

    fingerprint = ""

    def __init__(self, sandbox_id: str, backend_name: str = "", reason: str = "") -> None:
        self.sandbox_id = sandbox_id
        self.backend_name = backend_name
        self.reason = reason
        self.endpoint = SocketEndpoint(Path("/nonexistent"), b"")

    async def cause_of_death(self) -> str | None:
        return self.reason or None

    async def destroy(self) -> None:
        return
