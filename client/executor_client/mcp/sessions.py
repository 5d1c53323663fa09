"""The sessions of one MCP connection: found by name, created at first use, ended with the connection.

There are never more than `sessions_max`, not counting sessions that are ending. A lost session is replaced only on
request; until then every call with its name is refused. If the host cancels a call, its execution is cancelled, and the
call waits until the daemon has received that.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from executor_client._core.computer import ToolRefusal
from executor_client._core.limits import CANCEL_GRACE_S
from executor_client._core.package_modules import patterns_of, without_refused
from executor_client._core.requests import LimitsLike
from executor_client._core.status import is_session_gone
from executor_client.aio import AsyncExecutorClient
from executor_client.aio_computer import AsyncComputer
from executor_client.aio_session import AsyncSession, OnEvent
from executor_client.errors import NotFoundError, PolicyViolationError, PreconditionError
from executor_client.results import ExecutionResult, Policy, SessionInfo, VariablesState

_log = logging.getLogger(__name__)

DEFAULT_NAME = "default"
END_TIMEOUT_S = 5.0
"""Seconds to wait for the sessions to end with the connection; the daemon ends the rest when they are idle."""

_Result = TypeVar("_Result")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SessionRefused(Exception):
    """A request to a session is refused; the message tells a model what to do instead."""


@dataclass(frozen=True)
class SessionRequest:
    """The arguments with which each session is created."""

    image: str | None = None
    authorized_imports: tuple[str, ...] = ()
    limits: Mapping[str, float | int | str] | None = None
    network: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


class NamedSession:
    """One session and its name. A lost session stays lost."""

    def __init__(self, name: str, session: AsyncSession) -> None:
        self.name = name
        self.session = session
        self.lost = ""
        self._generation = session.generation
        self._computer = AsyncComputer(self._find)

    @contextmanager
    def watched(self) -> Iterator[AsyncSession]:
        """Wraps calls to the session. If the daemon no longer has it, marks it as lost and raises SessionRefused.

        Raises SessionRefused at once if the session is known to be lost.
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
        """Runs code. Returns the result, and True if the interpreter was replaced since the last call.

        When cancelled, it cancels the execution before it returns.
        """
        with self.watched() as session:
            result = await _cancelled_in_order(session.execute(code, on_event=on_event, limits=limits))
        replaced = result.generation != self._generation
        self._generation = result.generation
        if result.state is VariablesState.LOST:
            self.lose((result.error.message if result.error else "") or "its sandbox ended")
        return result, replaced

    async def use(self, work: Callable[[AsyncComputer], Coroutine[Any, Any, str]]) -> str:
        """Runs work on the shell and files. When cancelled, ends the work before it returns.

        Raises SessionRefused, with a reason for the model, if the work can't be done.
        """
        with self.watched():
            try:
                return await _cancelled_in_order(work(self._computer))
            except ToolRefusal as refusal:
                raise SessionRefused(str(refusal)) from refusal

    async def _find(self) -> AsyncSession:
        return self.session

    def lose(self, why: str) -> None:
        """Marks the session as lost. The first reason is kept."""
        self.lost = self.lost or why

    def _refusal(self) -> SessionRefused:
        return SessionRefused(
            f"the session {self.name!r} is gone, with its variables and files: {self.lost}. "
            "reset_session starts a new, empty one with this name"
        )


class Sessions:
    """All sessions of a connection. Leaving the context manager ends them."""

    def __init__(self, client: AsyncExecutorClient, request: SessionRequest, *, sessions_max: int) -> None:
        self._client = client
        self._request = request
        self._sessions_max = sessions_max
        # Tasks, so that concurrent calls share one creation, and a cancelled call does not cancel it.
        self._creations: dict[str, asyncio.Task[NamedSession]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, name: str, *, make: bool) -> NamedSession:
        """Returns the session of this name. Creates it if `make` is true or the name is the default one.

        Raises SessionRefused, and the client's errors when it cannot be created.
        """
        if not _NAME.fullmatch(name):
            raise SessionRefused(
                f"{name[:100]!r} is not a session name: use up to 64 letters, digits, '.', '_' and '-', and start with "
                "a letter or digit"
            )
        creation = self._creations.get(name)
        if creation is None:
            if not make and name != DEFAULT_NAME:
                raise SessionRefused(f"there is no session {name!r}; {self._listed()}")
            creation = self._start(name)
        return await asyncio.shield(creation)

    def _start(self, name: str) -> asyncio.Task[NamedSession]:
        if len(self._creations) >= self._sessions_max:
            raise SessionRefused(
                f"there can be at most {self._sessions_max} sessions; {self._listed()}. close_session ends one"
            )
        creation = asyncio.create_task(self._create(name))
        self._creations[name] = creation

        def forget_if_failed(task: asyncio.Task[NamedSession]) -> None:
            if (task.cancelled() or task.exception() is not None) and self._creations.get(name) is task:
                del self._creations[name]

        creation.add_done_callback(forget_if_failed)
        return creation

    async def _create(self, name: str) -> NamedSession:
        request = self._request
        modules: tuple[str, ...] = ()
        if request.packages:
            modules = (await self._client.prepare_environment(request.packages, request.image)).modules
        session = await self._client.create_session(
            request.image,
            request.authorized_imports,
            request.limits,
            labels={"client": "executor-mcp", "name": name},
            network=request.network,
            packages=request.packages,
        )
        try:
            await _authorize(session, modules)
        except BaseException:
            await session.close()
            raise
        return NamedSession(name, session)

    def _listed(self) -> str:
        return f"existing: {', '.join(sorted(self._creations))}" if self._creations else "there are none"

    async def close(self, name: str) -> None:
        """Ends the session of this name and all that runs in it. Raises SessionRefused when there is none."""
        creation = self._creations.pop(name, None)
        if creation is None:
            raise SessionRefused(f"there is no session {name[:100]!r}; {self._listed()}")
        await asyncio.shield(self._start_ending(creation, "it was closed"))

    def _start_ending(self, creation: asyncio.Task[NamedSession], why: str) -> asyncio.Task[None]:
        """Ends a session in a task of its own, which continues when the host cancels the call."""
        ending = asyncio.create_task(_end(creation, why))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def reset(self, name: str) -> NamedSession:
        """Ends the session of this name, if there is one, and starts an empty one."""
        if name in self._creations:
            await self.close(name)
        return await self.get(name, make=True)

    async def described(self) -> list[tuple[str, str, SessionInfo | None]]:
        """Returns each session's name, its state, and the daemon's description unless it is lost or being created."""
        described: list[tuple[str, str, SessionInfo | None]] = []
        for name, creation in sorted(self._creations.items()):
            if not creation.done():
                described.append((name, "being created", None))
                continue
            if creation.cancelled() or creation.exception() is not None:
                continue  # it failed, and its callback is about to remove it
            named = creation.result()
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
        ending = [self._start_ending(creation, "the connection ended") for creation in self._creations.values()]
        ending += self._ending - set(ending)
        self._creations.clear()
        if not ending:
            return
        with anyio.CancelScope(shield=True):
            _, late = await asyncio.wait(ending, timeout=END_TIMEOUT_S)
            for task in late:
                task.cancel()
            problems = await asyncio.gather(*ending, return_exceptions=True)
        for problem in filter(None, problems):
            _log.error("a session could not be ended; the daemon ends it when it is idle: %r", problem)


async def _cancelled_in_order(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Runs the work in its own task; when cancelled, waits until that task has ended.

    anyio raises its cancellation at every await of the SDK's task, even while the work is being cancelled.
    """
    running = asyncio.create_task(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({running}, timeout=2 * CANCEL_GRACE_S)
        raise


async def _authorize(session: AsyncSession, modules: Sequence[str]) -> None:
    """Authorizes the modules of the requested packages, as far as the policy allows."""
    patterns = patterns_of(modules)
    while patterns:
        try:
            await session.authorize_imports(patterns)
            return
        except PolicyViolationError as refusal:
            patterns = without_refused(patterns, refusal)


async def _end(creation: asyncio.Task[NamedSession], why: str) -> None:
    """Ends a session once it is created; does nothing if the creation failed."""
    try:
        await asyncio.wait({creation})
    except asyncio.CancelledError:
        creation.cancel()
        raise
    if creation.cancelled() or creation.exception() is not None:
        return
    named = creation.result()
    named.lose(why)
    await named.session.close()
