"""Watches of a session's files: the guest collects changes, and sends more when the caller has taken the last ones.

So a caller that reads nothing costs the daemon nothing, and each path is reported once, however often it changed. A
watch ends with its call, with the session or with the daemon, and can't be resumed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from executor_server.backends.channel import GuestChannel, Request, changes_part
from executor_server.core import FileChanges, Reason, ResourceExhausted
from executor_server.guest.wire.file_changes import NextChanges, UnwatchFiles, WatchFiles
from executor_server.sessions.guest_requests import GuestRequests
from executor_server.sessions.shared import SessionHooks

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

MAX_WATCHES = 8
"""Watches of one session at one time; the guest allows no more."""


class Watches:
    """The watches of one session."""

    def __init__(self, session: Session, requests: GuestRequests, channel: GuestChannel, hooks: SessionHooks) -> None:
        self._session = session
        self._admission = hooks.admission
        self._requests = requests
        self._channel = channel
        self._count = 0

    async def changes(self, path: str, *, recursive: bool) -> AsyncGenerator[FileChanges, None]:
        """Yields an empty value when the watch has begun, then changes. Ends when the caller leaves.

        Raises ResourceExhausted (too many watches, here or on the host), NotFound (the directory, at once or later),
        InvalidRequest, PreconditionFailed (the session is lost).
        """
        if self._count >= MAX_WATCHES:
            raise ResourceExhausted(
                Reason.TOO_MANY_WATCHES,
                f"this session has {MAX_WATCHES} watches, its maximum; end one",
                retry_after_s=1.0,
            )
        self._count += 1
        request = Request(changes_part, self._session.hold_reading)
        try:
            facts: dict[str, str | int | bool] = {"path": path, "recursive": recursive}
            await self._admission.action(self._session.facts, "watch_requested", facts)
            with self._requests.asking(
                request, lambda op: WatchFiles(op=op, path=path, recursive=recursive), counts=False
            ) as op:
                try:
                    yield await request.next() or FileChanges()
                    while (changes := await request.next()) is not None:
                        yield changes
                        self._channel.send(NextChanges(op=op))
                finally:
                    if not request.ended:
                        self._channel.send(UnwatchFiles(op=op))
        finally:
            self._count -= 1
