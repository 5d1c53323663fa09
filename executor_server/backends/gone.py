"""The sandbox of a session that has none any more, in the place of one that could be asked."""

from __future__ import annotations

from pathlib import Path

from executor_server.backends.base import SocketEndpoint


class GoneSandbox:
    """Implements `Sandbox`. `reason` is a clause for its owner, as `cause_of_death` is; empty where nobody knows."""

    fingerprint = ""
    pause_idle_s = None

    def __init__(self, sandbox_id: str, backend_name: str = "", reason: str = "") -> None:
        self.sandbox_id = sandbox_id
        self.backend_name = backend_name
        self.reason = reason
        self.endpoint = SocketEndpoint(Path("/nonexistent"), b"")

    def set_cpu_share(self, share: float) -> None:
        return

    async def oom_kills(self) -> int | None:
        return None

    async def cause_of_death(self) -> str | None:
        return self.reason or None

    async def pause(self) -> bool:
        return False

    async def wake(self) -> None:
        return

    async def label(self, session_id: str) -> None:
        return

    async def destroy(self) -> None:
        return
