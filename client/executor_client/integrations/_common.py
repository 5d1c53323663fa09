"""The common parts of all integrations: options, one client for each event loop, sessions found by name, and errors.

A framework keeps a reference to its sandbox, perhaps in a database, and another loop, process or machine uses it later.
The reference is the session's name, chosen before the session exists. So any number of first uses create one session,
and a creation that was cancelled halfway can be repeated or attached to.

A program's failure is a result. A lost session or an unreachable daemon is never one: `infrastructure_errors` raises
the framework's own error for it, so that it is not scored as the program's output.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from executor_client import AsyncExecutorClient, AsyncSession, CompletedProcess, ProcessResult, SessionState, TlsConfig
from executor_client._core.endpoint import Endpoint, resolve
from executor_client.errors import (
    AuthenticationError,
    AuthorizationError,
    CallTimeoutError,
    ConfigurationError,
    DaemonError,
    EnvironmentFailed,
    ExecutorClientError,
    ProtocolError,
    ResourceExhaustedError,
    SessionGone,
    UnavailableError,
)

T = TypeVar("T")
C = TypeVar("C", bound=type)
E = TypeVar("E", bound=CompletedProcess | ProcessResult)

INFRASTRUCTURE = (
    AuthenticationError,
    AuthorizationError,
    CallTimeoutError,
    ConfigurationError,
    DaemonError,
    EnvironmentFailed,
    ProtocolError,
    ResourceExhaustedError,
    SessionGone,
    UnavailableError,
)
"""Errors of the session, the daemon or the access to it. The program and the caller cause the others: a missing file, a
refused command, too much output."""


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports a framework; if it is missing or too old, the error names the extra to install."""
    try:
        yield
    except ImportError as error:
        advice = f"{error}: pip install 'remote-executor[{name}]'"
        raise type(error)(advice, name=error.name, path=error.path) from error


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The daemon, and the arguments of `create_session`. They hold no token: it comes from $EXECUTOR_TOKEN or from the
    local daemon's token file, so options can be stored and logged.

    `idle_time_s` and `limits` are limits of the session; the policy's defaults apply to the rest.
    """

    address: str | None = None
    tls: TlsConfig | bool | None = None
    image: str | None = None
    limits: Mapping[str, float | int | str] = field(default_factory=dict)
    idle_time_s: float | None = None
    network: Sequence[str] = ()
    packages: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `create_session`."""
        arguments = {each.name: getattr(self, each.name) for each in fields(self)}
        del arguments["address"], arguments["tls"]
        idle_time_s = arguments.pop("idle_time_s")
        if idle_time_s is not None:
            arguments["limits"] = {**self.limits, "idle_time_s": idle_time_s}
        return arguments


class PerLoop(Generic[T]):
    """A value for each event loop, made at its first use there. Values of closed loops are dropped.

    A forked child never sees a value of its parent, whose loop does not run there.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            # Not weak references: values refer to their loop. `list` is atomic where other threads have loops, too.
            for each in list(self._values):
                if each.is_closed():
                    self._values.pop(each, None)
            self._values[loop] = self._make()
        return self._values[loop]


_clients: PerLoop[dict[Endpoint, AsyncExecutorClient]] = PerLoop(dict)
_background_loops: dict[int, asyncio.AbstractEventLoop] = {}


def client(options: SessionOptions) -> AsyncExecutorClient:
    """Returns the running loop's client of the options' daemon. It is shared and never closed."""
    clients, key = _clients.get(), resolve(options.address, None, options.tls)
    if key not in clients:
        clients[key] = AsyncExecutorClient(options.address, tls=options.tls)
    return clients[key]


def _in_background(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    process = os.getpid()  # a fork has no thread of its parent
    if process not in _background_loops:
        loop = asyncio.new_event_loop()
        if _background_loops.setdefault(process, loop) is loop:
            threading.Thread(target=loop.run_forever, name="executor-integrations", daemon=True).start()
        else:
            loop.close()  # another thread was faster
    return asyncio.run_coroutine_threadsafe(work, _background_loops[process])


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in an event loop that always runs, in a thread, for callers whose own loop does not."""
    return await asyncio.wrap_future(_in_background(work))


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` in the loop of `in_background`, for callers without a loop. Cancels it if the wait is interrupted."""
    future = _in_background(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def attached_session(options: SessionOptions, *, framework: str) -> AsyncSession:
    """Creates a session that ends with this process. Its label `framework` names the framework."""
    labels = {"framework": framework, **options.labels}
    return await client(options).create_session(**replace(options, labels=labels).arguments())


class NamedSession:
    """A detached session, found by its name from any loop or process. Its label `framework` names the framework.

    Made without I/O. The first `get` creates the session, or returns the one of this name. If `must_exist`, and after
    the first `get`, it is never created again: SessionGone is raised for a session that has ended or is lost.
    """

    def __init__(
        self, options: SessionOptions, name: str | None = None, *, framework: str = "sandbox", must_exist: bool = False
    ) -> None:
        self.options = replace(options, labels={"framework": framework, **options.labels})
        self.name = name or f"{framework}-{uuid.uuid4().hex}"
        self.exists = must_exist
        """True once the session was created or found."""
        self._sessions: PerLoop[_Attached] = PerLoop(_Attached)

    async def get(self) -> AsyncSession:
        """Returns the session, attached to the running loop. Concurrent first calls create one session."""
        attached = self._sessions.get()
        async with attached.lock:
            if attached.session is None:
                attached.session = await self._attach()
        return attached.session

    async def _attach(self) -> AsyncSession:
        if self.exists:
            return _alive(await client(self.options).get_session(name=self.name))
        session = await client(self.options).session(self.name, **self.options.arguments())
        self.exists = True
        return session

    async def is_alive(self) -> bool:
        """Asks the daemon. False if the session has ended or is lost."""
        try:
            _alive(await client(self.options).get_session(name=self.name))
        except SessionGone:
            return False
        return True

    async def end(self) -> None:
        """Ends the session if there is one. Idempotent."""
        with contextlib.suppress(SessionGone):
            await (await client(self.options).get_session(name=self.name)).close()


class _Attached:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.session: AsyncSession | None = None


def _alive(session: AsyncSession) -> AsyncSession:
    if session.info.state is SessionState.LOST:
        raise SessionGone(f"session {session.name!r} is lost with its sandbox", reason="SESSION_LOST")
    return session


Kinds = type[ExecutorClientError] | tuple[type[ExecutorClientError], ...]


@contextlib.contextmanager
def infrastructure_errors(make: Callable[[str], Exception], kinds: Kinds = INFRASTRUCTURE) -> Iterator[None]:
    """Raises the framework's own error, `make(message)`, for errors of the infrastructure. Others pass unchanged."""
    try:
        yield
    except kinds as error:
        raise make(str(error)) from error


class Failures:
    """For frameworks whose tools answer the model with the text of each exception, even of an infrastructure error.

    Such a framework calls our code before the model's next turn. That call raises the last failure, which ends the run,
    so the answer is not scored.
    """

    def __init__(self, make: Callable[[str], Exception] | None = None) -> None:
        """`make` as for `infrastructure_errors`; without it, our own error passes."""
        self._make = make
        self._last: Exception | None = None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """`infrastructure_errors` for a tool's call."""
        try:
            yield
        except INFRASTRUCTURE as error:
            if self._make is None:
                self._last = error
                raise
            self._last = self._make(str(error))
            raise self._last from error

    def raise_last(self) -> None:
        """Raises the last failure, once: the next run may find the daemon again."""
        last, self._last = self._last, None
        if last is not None:
            raise last


def calls_raise(make: Callable[[str], Exception], kinds: Kinds = INFRASTRUCTURE) -> Callable[[C], C]:
    """Class decorator: `infrastructure_errors` in each public coroutine method of the class."""

    def decorate(kind: C) -> C:
        for name, method in list(vars(kind).items()):
            if inspect.iscoroutinefunction(method) and not name.startswith("_"):
                setattr(kind, name, _translated(method, make, kinds))
        return kind

    return decorate


def _translated(method: Callable[..., Any], make: Callable[[str], Exception], kinds: Kinds) -> Callable[..., Any]:
    @functools.wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        with infrastructure_errors(make, kinds):
            return await method(*args, **kwargs)

    return call


def not_lost(ended: E) -> E:
    """Returns a command's result. Raises SessionGone if it is lost, which says nothing about the command."""
    result = ended.result if isinstance(ended, CompletedProcess) else ended
    if result.outcome == "lost":
        raise SessionGone(f"the command is lost: {result.lost_reason}", reason="SESSION_LOST")
    return ended


def text(output: bytes) -> str:
    """Decodes output as UTF-8; invalid bytes are replaced."""
    return output.decode("utf-8", "replace")
