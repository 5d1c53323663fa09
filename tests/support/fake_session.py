"""Sessions on fake guests, made as a manager makes them and ended by the test's end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from executor_server.backends.channel import GuestChannel
from executor_server.core.config.state_dir import StateDir
from executor_server.core.model import Log, OutputMode, Principal, Result
from executor_server.sessions import SessionManager
from executor_server.sessions.journal.execution import Execution
from executor_server.sessions.journal.registry import Registry, SessionRecord
from executor_server.sessions.lifetime import steady_s
from executor_server.sessions.pool.asked_kinds import AskedSettings
from executor_server.sessions.pool.pool import PoolSettings, WarmPool, make_ready
from executor_server.sessions.session import Session
from executor_server.sessions.shared import SessionHooks, SessionSettings
from tests.support.fake_backend import SPEC, FakeBackend, FakeSandbox
from tests.support.fake_guest import TOKEN, FakeGuest
from tests.support.polling import eventually_async
from tests.support.specs import EXECUTION_LIMITS, session_spec

OWNER = Principal("tenant", "test")

MakeSession = Callable[[SessionHooks | None, SessionSettings], Awaitable[tuple[Session, FakeSandbox, GuestChannel]]]


@asynccontextmanager
async def sessions_on(backend: FakeBackend, directory: Path) -> AsyncIterator[MakeSession]:
    """Gives a function that makes a session, its sandbox and the channel between them; `directory` is the daemon's state."""
    made: list[Session] = []
    registry = Registry(StateDir(directory))

    async def make(hooks: SessionHooks | None, settings: SessionSettings) -> tuple[Session, FakeSandbox, GuestChannel]:
        ready = await make_ready(backend, SPEC, warm=False)
        spec = session_spec(SPEC, imports=("math",))
        record = SessionRecord(
            "s", OWNER, "r", spec, "fake", ready.sandbox.sandbox_id, TOKEN, "3.11.0", False, time.time(), 1
        )
        session = Session(record, ready.sandbox, ready.channel, registry, settings, hooks)
        session.begin()
        session.executions.journal.begin_segments()
        made.append(session)
        return session, backend.made[-1], ready.channel

    yield make
    for session in made:
        await session.close("the test is over")
        await session.destroy()
    registry.close()


async def execute(session: Session, name: str = "e", code: str = "1") -> Execution:
    return await session.execute(name, code, OutputMode.TRAILING_EXPRESSION, EXECUTION_LIMITS)


async def outcome_of(execution: Execution) -> tuple[str, Result]:
    """The text and the result of an execution."""
    kinds = [event.kind async for event in execution.events()]
    assert isinstance(kinds[-1], Result)
    return "".join(kind.text for kind in kinds if isinstance(kind, Log)), kinds[-1]


async def result_of(execution: Execution) -> Result:
    return (await outcome_of(execution))[1]


async def abandon(manager: SessionManager) -> None:
    """Stops the manager's sessions at once, as SIGKILL does, without a message to their guests."""
    tasks: list[asyncio.Task[Any]] = []
    await manager.sweeper.close()
    for session in manager.list_all():
        session._channel.close()
        tasks += session._tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def hung_up(backend: FakeBackend) -> None:
    """Waits until the guests have noticed the end of their connections."""
    for sandbox in backend.made:
        connections = sandbox.guest.connections
        await eventually_async(lambda connections=connections: all(c.transport is None for c in connections))  # type: ignore[misc]


class SessionDaemon:
    """The sessions of one daemon. The backend and the state directory are all that outlives its `kill`."""

    def __init__(
        self,
        backend: FakeBackend,
        directory: Path,
        hooks: SessionHooks | None = None,
        clock: Callable[[], float] = steady_s,
        **settings: Any,
    ) -> None:
        self.backend = backend
        self.directory = directory
        self.registry = Registry(StateDir(directory))
        # It adapts to no requests: a pool that makes sandboxes has tasks, which would outlive `kill`.
        self.pool = WarmPool(backend, PoolSettings(asked=AskedSettings(max_kinds=0)))
        self.manager = SessionManager(backend, self.pool, self.registry, SessionSettings(**settings), hooks, clock)

    @property
    def guest(self) -> FakeGuest:
        """The guest of the newest sandbox."""
        return self.backend.made[-1].guest

    async def kill(self) -> None:
        """Stops all of it at once, without a notification."""
        await abandon(self.manager)
        self.registry.close()
        await hung_up(self.backend)

    async def close(self) -> None:
        await self.manager.close()
        await self.pool.close()
        self.registry.close()


D = TypeVar("D", bound=SessionDaemon)


@asynccontextmanager
async def successive_daemons(
    backend: FakeBackend, make: Callable[..., D]
) -> AsyncIterator[Callable[..., Awaitable[D]]]:
    """Gives a function that kills the last daemon, if there is one, and starts the next, which `make` makes."""
    daemons: list[D] = []

    async def start(*arguments: Any, **settings: Any) -> D:
        if daemons:
            await daemons[-1].kill()
        daemons.append(make(*arguments, **settings))
        await daemons[-1].manager.recover()
        return daemons[-1]

    yield start
    if daemons:
        await daemons[-1].close()
    await backend.close()
    assert await eventually_async(lambda: len(asyncio.all_tasks()) == 1), "a task outlived the daemon"
