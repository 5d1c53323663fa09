"""Sessions on fake guests, made as a manager makes them and ended by the test's end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from executor_server.model import Principal
from executor_server.pool import make_ready
from executor_server.registry import Registry, SessionRecord
from executor_server.session import Session
from executor_server.session_requests import SessionSettings, Watch
from executor_server.state_dir import StateDir
from tests.support.fake_backend import SPEC, FakeBackend, FakeSandbox
from tests.support.fake_guest import TOKEN
from tests.support.specs import session_spec

OWNER = Principal("tenant", "test")

MakeSession = Callable[[Watch | None, SessionSettings], Awaitable[tuple[Session, FakeSandbox]]]


@asynccontextmanager
async def sessions_on(backend: FakeBackend, directory: Path) -> AsyncIterator[MakeSession]:
    """Makes a session and its sandbox for whoever calls what this gives; `directory` is the daemon's state."""
    made: list[Session] = []
    registry = Registry(StateDir(directory))

    async def make(watch: Watch | None, settings: SessionSettings) -> tuple[Session, FakeSandbox]:
        ready = await make_ready(backend, SPEC, warm=False)
        spec = session_spec(SPEC, imports=("math",))
        record = SessionRecord(
            "s", OWNER, "r", spec, "fake", ready.sandbox.sandbox_id, TOKEN, "3.11.0", False, time.time(), 1
        )
        session = Session(record, ready.sandbox, ready.channel, registry, settings, watch)
        session.begin()
        session._begin_tape()
        made.append(session)
        return session, backend.made[-1]

    yield make
    for session in made:
        await session.close("the test is over")
    registry.close()
