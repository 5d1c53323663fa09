"""The sessions of one MCP connection: by name, made at first use, ended with the connection.

Promises: there are never more than `sessions_max`, but for those that are just being ended; a session that is gone is
never replaced unless that was asked for, and every call on its name says so until then; a call that the host cancels
cancels its execution, and waits until the daemon knows.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio

from executor_client._limits import CANCEL_GRACE_S
from executor_client._requests import LimitsLike
from executor_client._status import is_session_gone
from executor_client.aio import AsyncExecutorClient
from executor_client.aio_session import AsyncSession, OnEvent
from executor_client.errors import NotFoundError, PreconditionError
from executor_client.results import ExecutionResult, Policy, SessionInfo, VariablesState

_log = logging.getLogger(__name__)

DEFAULT_NAME = "default"
END_TIMEOUT_S = 5.0
"""How long the end of the connection waits for its sessions to end; the daemon ends what is left when it is idle."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SessionRefused(Exception):
    """What was asked of a session cannot be had; the message, made for a model, says what can be done."""


@dataclass(frozen=True)
class SessionRequest:
    """What is asked of the daemon for each session."""

    image: str | None = None
    authorized_imports: tuple[str, ...] = ()
    limits: Mapping[str, float | int | str] | None = None


class NamedSession:
    """One session under its name. Once it is lost it stays so."""

    def __init__(self, name: str, session: AsyncSession) -> None:
        self.name = name
        self.session = session
        self.lost = ""
        self._generation = session.generation

    @contextmanager
    def watched(self) -> Iterator[AsyncSession]:
        """For calls to the session: notes when the daemon says that there is no such session any more.

        Raises SessionRefused then, and at once when that is known already.
        """
        if self.lost:
            raise self._refusal()
        try:
            yield self.session
        except (NotFoundError, PreconditionError) as error:
            if not is_session_gone(error):
                raise
            self.lose(error.message)
            raise self._refusal() from error

    async def run(
        self, code: str, on_event: OnEvent | None = None, limits: LimitsLike = None
    ) -> tuple[ExecutionResult, bool]:
        """Runs code; returns how it ended, and whether the interpreter is another one than after the last call.

        Cancelled, it first cancels the execution.
        """
        with self.watched() as session:
            # In a task of its own: the SDK's cancellation strikes again at every await of its task, so the execution
            # could not be cancelled from there.
            running = asyncio.create_task(session.execute(code, on_event=on_event, limits=limits))
            try:
                result = await asyncio.shield(running)
            except asyncio.CancelledError:
                running.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({running}, timeout=2 * CANCEL_GRACE_S)
                raise
        replaced = result.generation != self._generation
        self._generation = result.generation
        if result.state is VariablesState.LOST:
            self.lose((result.error.message if result.error else "") or "its sandbox ended")
        return result, replaced

    def lose(self, why: str) -> None:
        """Notes that the session is gone. The first reason given is the one that counts."""
        self.lost = self.lost or why

    def _refusal(self) -> SessionRefused:
        return SessionRefused(
            f"the session {self.name!r} is gone, with its variables and files: {self.lost}. "
            "reset_session starts a new, empty one under this name"
        )


class Sessions:
    """As a context manager it ends them all."""

    def __init__(self, client: AsyncExecutorClient, request: SessionRequest, *, sessions_max: int) -> None:
        self._client = client
        self._request = request
        self._sessions_max = sessions_max
        # As tasks: two calls that come at once wait for the same making, and a cancelled call does not end it.
        self._making: dict[str, asyncio.Task[NamedSession]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, name: str, *, make: bool) -> NamedSession:
        """The session of this name. Unless it is the default one, it is made only where `make` says so.

        Raises SessionRefused, and the client's errors when it cannot be made.
        """
        if not _NAME.fullmatch(name):
            raise SessionRefused(
                f"{name[:100]!r} is no name for a session: up to 64 letters, digits, '.', '_' and '-' make one, "
                "the first of them a letter or a digit"
            )
        making = self._making.get(name)
        if making is None:
            if not make and name != DEFAULT_NAME:
                raise SessionRefused(f"there is no session {name!r}; {self._listed()}")
            making = self._start(name)
        return await asyncio.shield(making)

    def _start(self, name: str) -> asyncio.Task[NamedSession]:
        if len(self._making) >= self._sessions_max:
            raise SessionRefused(
                f"there cannot be more than {self._sessions_max} sessions; {self._listed()}. "
                "close_session ends one that is not needed any more"
            )
        making = asyncio.create_task(self._make(name))
        self._making[name] = making

        def forget_if_failed(task: asyncio.Task[NamedSession]) -> None:
            if (task.cancelled() or task.exception() is not None) and self._making.get(name) is task:
                del self._making[name]

        making.add_done_callback(forget_if_failed)
        return making

    async def _make(self, name: str) -> NamedSession:
        session = await self._client.create_session(
            self._request.image,
            self._request.authorized_imports,
            self._request.limits,
            labels={"client": "executor-mcp", "name": name},
        )
        return NamedSession(name, session)

    def _listed(self) -> str:
        return f"there are: {', '.join(sorted(self._making))}" if self._making else "there is none"

    async def close(self, name: str) -> None:
        """Ends the session of this name and what runs in it. Raises SessionRefused when there is none."""
        making = self._making.pop(name, None)
        if making is None:
            raise SessionRefused(f"there is no session {name[:100]!r}; {self._listed()}")
        await asyncio.shield(self._start_ending(making, "it was closed"))

    def _start_ending(self, making: asyncio.Task[NamedSession], why: str) -> asyncio.Task[None]:
        """In a task of its own: what was begun goes on when the host cancels the call."""
        ending = asyncio.create_task(_end(making, why))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def reset(self, name: str) -> NamedSession:
        """Ends the session of this name, if there is one, and starts an empty one."""
        if name in self._making:
            await self.close(name)
        return await self.get(name, make=True)

    async def described(self) -> list[tuple[str, str, SessionInfo | None]]:
        """Each session's name, how it is, and, unless it is gone or not there yet, how the daemon describes it."""
        described: list[tuple[str, str, SessionInfo | None]] = []
        for name, making in sorted(self._making.items()):
            if not making.done():
                described.append((name, "being made", None))
                continue
            if making.cancelled() or making.exception() is not None:
                continue  # it could not be made, which is forgotten in a moment
            named = making.result()
            try:
                with named.watched() as session:
                    info = await session.refresh()
                described.append((name, info.state.value, info))
            except SessionRefused:
                described.append((name, f"gone: {named.lost}", None))
        return described

    async def policy(self) -> Policy:
        return await self._client.get_policy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending = [self._start_ending(making, "the connection ended") for making in self._making.values()]
        ending += self._ending - set(ending)
        self._making.clear()
        if not ending:
            return
        with anyio.CancelScope(shield=True):
            _, late = await asyncio.wait(ending, timeout=END_TIMEOUT_S)
            for task in late:
                task.cancel()
            problems = await asyncio.gather(*ending, return_exceptions=True)
        for problem in filter(None, problems):
            _log.error("a session could not be ended; the daemon does so when it is idle: %r", problem)


async def _end(making: asyncio.Task[NamedSession], why: str) -> None:
    """Ends a session, once it is made. One that could not be made needs no end."""
    try:
        await asyncio.wait({making})
    except asyncio.CancelledError:
        making.cancel()
        raise
    if making.cancelled() or making.exception() is not None:
        return
    named = making.result()
    named.lose(why)
    await named.session.close()
