"""Labels sandboxes with their sessions, so that an operator finds them."""

from __future__ import annotations

import asyncio

from executor_server.backends import Sandbox

# Seconds before a new sandbox is labelled: renaming a container costs milliseconds, and the caller's answer goes first.
_LABEL_PAUSE_S = 0.1


async def label_soon(sandbox: Sandbox, session_id: str) -> None:
    """Labels a sandbox after a moment."""
    await asyncio.sleep(_LABEL_PAUSE_S)
    await sandbox.label(session_id)
