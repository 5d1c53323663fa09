"""The client against the fake daemon: with --all both, else the asyncio one, of which the blocking one is generated.

The asyncio client is driven from outside its loop, so that one text tests both.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executor_client import AsyncExecutorClient, AsyncSession, AsyncSessionFiles, ExecutorClient
from tests.support import rounds
from tests.support.fake_daemon import TOKEN, FakeDaemon, serve


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    # Not tmp_path: a Unix socket's path has room for about a hundred characters.
    with tempfile.TemporaryDirectory(prefix="fake") as directory, serve(Path(directory)) as daemon:
        yield daemon


class Driven:
    """An asyncio object whose coroutine methods are called as if they were plain ones."""

    def __init__(self, driven: Any, runner: asyncio.Runner) -> None:
        self._driven = driven
        self._runner = runner

    def __enter__(self) -> Any:
        self._runner.run(self._driven.__aenter__())
        return self

    def __exit__(self, *exc: Any) -> None:
        self._runner.run(self._driven.__aexit__(*exc))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._driven, name)
        if isinstance(attribute, AsyncSessionFiles):
            return Driven(attribute, self._runner)
        return self._call(attribute) if inspect.iscoroutinefunction(attribute) else attribute

    def _call(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            returned = self._runner.run(method(*args, **kwargs), context=contextvars.copy_context())
            return Driven(returned, self._runner) if isinstance(returned, AsyncSession) else returned

        return call


@pytest.fixture
def client_options() -> dict[str, Any]:
    """More arguments of `client`, for a module to set."""
    return {}


@pytest.fixture(params=["asyncio", "sync"] if rounds.ALL else ["asyncio"])
def client(request: pytest.FixtureRequest, daemon: FakeDaemon, client_options: dict[str, Any]) -> Iterator[Any]:
    options: Any = {"token": TOKEN, "connect_timeout_s": 2.0, "reconnect_timeout_s": 2.0, **client_options}
    if request.param == "sync":
        with ExecutorClient(daemon.address, **options) as client:
            yield client
        return

    async def connect() -> AsyncExecutorClient:
        return AsyncExecutorClient(daemon.address, **options)

    with asyncio.Runner() as runner:
        driven = Driven(runner.run(connect()), runner)
        yield driven
        driven.close()


@pytest.fixture
def session(client: Any, daemon: FakeDaemon) -> Iterator[Any]:
    session = client.create_session()
    daemon.requests.clear()
    yield session
    session.close()
