"""The sessions in which the tools work, found by name and created at first use.

`ConnectionSessions` are those of one host over stdin and stdout, and end with its connection. Over HTTP there is no
connection: `tenant_sessions` finds the caller's sessions at the daemon.

A lost session is replaced only on request; until then every call with its name is refused. If the host cancels a call,
its execution is cancelled, and the call waits until the daemon has received the cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import anyio

from executor_client._core.computer import ToolRefusal
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

NAMES_LISTED_MAX = 20


NAME_CHARS_MAX = 48
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAME_CHARS_MAX - 1}}}")


class SessionRefused(Exception):
    """A request to a session is refused; the message tells a model what to do instead."""


class NoSuchSession(SessionRefused):
    """There is no session of this name."""


@dataclass(frozen=True)
class SessionRequest:
    """The arguments with which each session is created."""

    image: str | None = None
    authorized_imports: tuple[str, ...] = ()
    limits: Mapping[str, float | int | str] | None = None
    network: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


class NamedSession:
    """One session and its name. A lost session stays lost.

    `note` is a sentence for the model that belongs to the result of this call.
    """

    def __init__(self, name: str, session: AsyncSession, note: str = "") -> None:
        self.name = name
        self.session = session
        self.note = note
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
            result = await session.execute(code, on_event=on_event, limits=limits)
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
                return await work(self._computer)
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


class Sessions(ABC):
    """The sessions of one caller, by the names that its model chose."""

    def __init__(self, client: AsyncExecutorClient, request: SessionRequest, *, sessions_max: int) -> None:
        self._client = client
        self._request = request
        self._sessions_max = sessions_max

    @abstractmethod
    async def get(self, name: str, *, make: bool) -> NamedSession:
        """Returns the session of this name, or creates it if `make` is true.

        Raises NoSuchSession, SessionRefused, and the client's errors when it cannot be created.
        """

    @abstractmethod
    async def close(self, name: str) -> None:
        """Ends the session of this name and all that runs in it. Raises NoSuchSession."""

    @abstractmethod
    async def described(self) -> list[tuple[str, str, SessionInfo | None]]:
        """Returns each session's name, its state, and the daemon's description unless it is lost or being created."""

    async def reset(self, name: str) -> NamedSession:
        """Ends the session of this name, if there is one, and starts an empty one."""
        with contextlib.suppress(NoSuchSession):
            await self.close(name)
        return await self.get(name, make=True)

    async def policy(self) -> Policy:
        return await self._client.get_policy()

    async def _create(self, label: str, /, **arguments: Any) -> AsyncSession:
        """Creates a session as requested, with further arguments of `create_session`."""
        request = self._request
        modules: tuple[str, ...] = ()
        if request.packages:
            modules = (await self._client.prepare_environment(request.packages, request.image)).modules
        session = await self._client.create_session(
            request.image,
            request.authorized_imports,
            request.limits,
            labels={"client": "executor-mcp", "name": label},
            network=request.network,
            packages=request.packages,
            **arguments,
        )
        try:
            await _authorize(session, modules)
        except BaseException:
            await session.close()
            raise
        return session

    def _check_number(self, names: Collection[str]) -> None:
        """Raises SessionRefused if there can't be another session besides these."""
        if len(names) >= self._sessions_max:
            raise SessionRefused(
                f"there can be at most {self._sessions_max} sessions; {listed(names)}. close_session ends one"
            )


class ConnectionSessions(Sessions):
    """The sessions of a connection. Leaving the context manager ends them."""

    def __init__(self, client: AsyncExecutorClient, request: SessionRequest, *, sessions_max: int) -> None:
        super().__init__(client, request, sessions_max=sessions_max)
        # Tasks, so that concurrent calls share one creation, and a cancelled call does not cancel it.
        self._creations: dict[str, asyncio.Task[NamedSession]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def get(self, name: str, *, make: bool) -> NamedSession:
        check_name(name)
        creation = self._creations.get(name)
        if creation is None:
            if not make and name != DEFAULT_NAME:
                raise no_such_session(name, self._creations)
            creation = self._start(name)
        return await asyncio.shield(creation)

    def _start(self, name: str) -> asyncio.Task[NamedSession]:
        self._check_number(self._creations)
        creation = asyncio.create_task(self._make(name))
        self._creations[name] = creation

        def forget_if_failed(task: asyncio.Task[NamedSession]) -> None:
            if (task.cancelled() or task.exception() is not None) and self._creations.get(name) is task:
                del self._creations[name]

        creation.add_done_callback(forget_if_failed)
        return creation

    async def _make(self, name: str) -> NamedSession:
        return NamedSession(name, await self._create(name))

    async def close(self, name: str) -> None:
        creation = self._creations.pop(name, None)
        if creation is None:
            raise no_such_session(name, self._creations)
        await asyncio.shield(self._start_ending(creation, "it was closed"))

    def _start_ending(self, creation: asyncio.Task[NamedSession], why: str) -> asyncio.Task[None]:
        """Ends a session in a task of its own, which continues when the host cancels the call."""
        ending = asyncio.create_task(_end(creation, why))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def described(self) -> list[tuple[str, str, SessionInfo | None]]:
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
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


def check_name(name: str) -> None:
    """Raises SessionRefused for a name that no session can have."""
    if not _NAME.fullmatch(name):
        raise SessionRefused(
            f"{name[:100]!r} is not a session name: use up to {NAME_CHARS_MAX} letters, digits, '.', '_' and '-', and "
            "start with a letter or digit"
        )


def no_such_session(name: str, names: Collection[str]) -> NoSuchSession:
    return NoSuchSession(f"there is no session {name[:100]!r}; {listed(names)}")


def listed(names: Collection[str]) -> str:
    return f"existing: {', '.join(sorted(names)[:NAMES_LISTED_MAX])}" if names else "there are none"


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
