"""Requests to E2B's cloud: the only file that knows its SDK.

Every call ends with an answer or with an error of failures.py, by one table. The SDK raises its own exceptions, those
of the three libraries below it, and for an unreadable answer any exception (KeyError, JSONDecodeError, a bare
Exception); their texts come from the cloud. So a text leaves this file only after everything that looks like a secret
is removed from it, and the exceptions never leave it: their frames hold the key.

The SDK gets the key with each call. It goes to the cloud's own interface, never to a sandbox: requests to a sandbox
carry a token that is valid for this sandbox only.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import signature
from traceback import walk_tb
from typing import Any, NamedTuple

import e2b
import httpx
from e2b.sandbox_async.commands.command import Commands

from executor_server.backends.e2b.archives import upload_s
from executor_server.backends.e2b.failures import (
    CannotWake,
    CloudFailure,
    CommandFailed,
    Failed,
    Final,
    KeyRefused,
    Missing,
    NotRunning,
    TryLater,
    Unanswered,
)

_ROOT = "root"
_PAGE_SANDBOXES = 100
# Additional seconds for a pause: the cloud writes all of the sandbox's memory.
_PAUSE_MORE_S = 60.0
_MAX_PAGES = 100
_SHOWN_CHARS = 200
_READ_CHARS = 8_192  # of an output or an error; the rest is dropped
# In the stream of a command: far more than one read of its output returns.
_PIECE_BYTES = 2**20
_MESSAGE_BYTES_MAX = 4 * 2**20
_CLOUD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
# Keys and tokens, which are longer than any id of a sandbox; and the user and password of an address.
_SECRETS = (re.compile(r"[A-Za-z0-9+/=_-]{32,}"), re.compile(r"(?<=//)[^/@\s]*(?=@)"))
_SECONDS = re.compile(r"[0-9]{1,6}", re.ASCII)
_NOT_FOUND = 404
# Statuses of refusals that repeating won't change, except those in _NOT_NOW. 501: not offered.
_REFUSALS = (*range(400, 500), 501)
_FAILURES = range(500, 600)
_NOT_NOW = frozenset({408, 409, 423, 425, 429})


def missing_options() -> list[str]:
    """Names the needed options that the installed SDK lacks; with any, it is too old."""
    needed: tuple[tuple[Callable[..., object], tuple[str, ...]], ...] = (
        (e2b.AsyncSandbox.create, ("idempotency_key", "allow_internet_access", "metadata")),
        # Without it, all output of a guest would stay in memory.
        (Commands.run, ("retain_output",)),
        (e2b.ConnectionConfig, ("retries", "api_url", "sandbox_url")),
    )
    return [name for function, names in needed for name in names if name not in signature(function).parameters]


@dataclass(frozen=True)
class Access:
    """Key, addresses and limits of requests to the cloud."""

    api_key: str = field(repr=False)
    api_url: str | None  # None: from the SDK's own environment variables
    sandbox_url: str | None
    request_timeout_s: float
    concurrency: int


@dataclass(frozen=True)
class Listed:
    """A sandbox as the cloud lists it."""

    cloud_id: str
    metadata: Mapping[str, str]
    paused: bool


class Machine:
    """Requests to a sandbox that was running a moment ago."""

    def __init__(self, cloud: Cloud, sandbox: e2b.AsyncSandbox) -> None:
        self._cloud = cloud
        self._sandbox = sandbox
        self.cloud_id = _checked(sandbox.sandbox_id)
        # The SDK would read a message of any length into memory. Its library has a bound, which the SDK never sets.
        rpc: Any = getattr(sandbox.commands, "_rpc", None)
        if hasattr(rpc, "_read_max_bytes"):
            rpc._read_max_bytes = _MESSAGE_BYTES_MAX

    async def upload(self, path: str, data: bytes) -> None:
        """Makes the file and the directories above it, owned by root. Raises CloudFailure."""
        async with self._cloud.request(upload_s(len(data))):
            # The SDK sends a file object piece by piece. It sends bytes at once, and its transport copies them.
            content = data if len(data) <= _PIECE_BYTES else io.BytesIO(data)
            await self._sandbox.files.write(path, content, user=_ROOT, request_timeout=0)  # limited above

    async def run(self, command: str, *, timeout_s: float) -> str:
        """Runs the command as root and returns its standard output, or the beginning of it.

        Raises CloudFailure; CommandFailed when its exit code is not 0.
        """
        output: list[str] = []
        errors: list[str] = []
        async with self._cloud.request(timeout_s):
            try:
                await self._sandbox.commands.run(
                    command,
                    user=_ROOT,
                    cwd="/",
                    timeout=timeout_s,
                    request_timeout=self._cloud.access.request_timeout_s,
                    on_stdout=_collected(output),
                    on_stderr=_collected(errors),
                    retain_output=False,
                )
            except e2b.CommandExitException as ended:
                raise CommandFailed(ended.exit_code, self._cloud.harmless("".join(errors))) from None
        return "".join(output)

    async def start(self, command: str, on_output: Callable[[str], Awaitable[None]]) -> RunningCommand:
        """Starts a command as root, without a time limit. Raises CloudFailure."""
        handle: e2b.AsyncCommandHandle[Any] | None = None
        try:
            async with self._cloud.translated():
                handle = await self._sandbox.commands.run(
                    command,
                    background=True,
                    user=_ROOT,
                    cwd="/",
                    stdin=True,
                    timeout=0,
                    request_timeout=self._cloud.access.request_timeout_s,
                    on_stdout=on_output,
                    on_stderr=_ignored,
                    retain_output=False,
                )
        except asyncio.CancelledError:
            if handle is not None:  # the cancellation came with the answer
                await handle.disconnect()
            raise
        return RunningCommand(self._cloud, handle)


class RunningCommand:
    """A command whose input and output the daemon uses. Implements `transport.RelayCommand`."""

    def __init__(self, cloud: Cloud, handle: e2b.AsyncCommandHandle[Any]) -> None:
        self._cloud = cloud
        self._handle = handle

    async def send(self, data: bytes) -> None:
        async with self._cloud.translated():
            await self._handle.send_stdin(data, self._cloud.access.request_timeout_s)

    async def ended(self) -> int:
        async with self._cloud.translated():
            try:
                await self._handle.wait()
            except e2b.CommandExitException as ended:
                return ended.exit_code
        return 0

    async def stop(self) -> None:
        try:
            if self._handle.exit_code is None:
                async with self._cloud.translated():
                    await self._handle.kill()
        finally:
            await self._handle.disconnect()


class Cloud:
    """The account's sandboxes. It makes each request once."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._slots = asyncio.Semaphore(access.concurrency)
        # At INFO it logs every request, with its address.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    async def create(
        self, template: str, *, lifetime_s: float, metadata: Mapping[str, str], request_id: str
    ) -> Machine:
        """Makes a sandbox. `request_id`: the cloud makes one sandbox for repeated requests with the same id.

        Raises Missing when there is no such template, TryLater when there is no room. When the answer was lost, there
        may be a sandbox, with the metadata.
        """
        async with self.request():
            sandbox = await e2b.AsyncSandbox.create(
                template,
                timeout=math.ceil(lifetime_s),
                metadata=dict(metadata),
                envs={},
                secure=True,
                allow_internet_access=False,
                idempotency_key=request_id,
                **self._parameters(),
            )
        return Machine(self, sandbox)

    async def connect(self, cloud_id: str, *, lifetime_s: float) -> Machine:
        """Wakes it if it is paused; it then lives for `lifetime_s` at least. Raises Missing, CloudFailure."""
        async with self.request():
            sandbox = await e2b.AsyncSandbox.connect(cloud_id, timeout=math.ceil(lifetime_s), **self._parameters())
        if sandbox.sandbox_id != cloud_id:
            raise CloudFailure("E2B answers for another sandbox than it was asked for")
        return Machine(self, sandbox)

    async def list(self, metadata: Mapping[str, str]) -> list[Listed]:
        """Returns all that have this metadata, running or paused. Raises CloudFailure."""
        listed: list[Listed] = []
        pages = e2b.AsyncSandbox.list(
            query=e2b.SandboxQuery(metadata=dict(metadata)), limit=_PAGE_SANDBOXES, **self._parameters()
        )
        for _ in range(_MAX_PAGES):
            async with self.request():
                found = await pages.next_items()
                listed += [_listed(one) for one in found]
            if not pages.has_next:
                # Filtered again: with a cloud that ignores the filter, other users' sandboxes would be killed.
                return [one for one in listed if metadata.items() <= one.metadata.items()]
        raise CloudFailure(f"the list of sandboxes does not end after {_MAX_PAGES} pages")

    async def kill(self, cloud_id: str) -> bool:
        """Ends it; False when there was none. Raises CloudFailure."""
        async with self.request():
            return await e2b.AsyncSandbox.kill(cloud_id, **self._parameters())

    async def prolong(self, cloud_id: str, *, lifetime_s: float) -> None:
        """Sets its end to `lifetime_s` from now. Raises Missing, CloudFailure."""
        async with self.request():
            await e2b.AsyncSandbox.set_timeout(cloud_id, math.ceil(lifetime_s), **self._parameters())

    async def look(self, cloud_id: str) -> Listed:
        """Returns the cloud's information about it. Raises Missing, CloudFailure."""
        async with self.request():
            return _listed(await e2b.AsyncSandbox.get_info(cloud_id, **self._parameters()))

    async def pause(self, cloud_id: str) -> bool:
        """Pauses it and keeps its memory; False when it was not running. Raises Missing, CloudFailure.

        Raises Final when the cloud refuses: for this template or account it is not possible.
        """
        timeout_s = self.access.request_timeout_s + _PAUSE_MORE_S
        async with self.request(_PAUSE_MORE_S):
            return await e2b.AsyncSandbox.pause(cloud_id, **{**self._parameters(), "request_timeout": timeout_s})

    async def allow_hosts(self, cloud_id: str, hosts: Sequence[str]) -> None:
        """Lets the machine reach these hosts and nothing else. Raises Missing, CloudFailure."""
        network: e2b.SandboxNetworkUpdate = {"allow_out": list(hosts), "deny_out": [e2b.ALL_TRAFFIC]}
        async with self.request():
            await e2b.AsyncSandbox.update_network(cloud_id, network, **self._parameters())

    def _parameters(self) -> Any:
        """Parameters of each call of the SDK."""
        access = self.access
        parameters: dict[str, object] = {
            "api_key": access.api_key,
            "request_timeout": access.request_timeout_s,
            "retries": 0,  # retry.py alone decides which requests are repeated, and how often
            "debug": False,  # overrides the environment: it would make the SDK talk to no cloud at all
        }
        optional = {"api_url": access.api_url, "sandbox_url": access.sandbox_url}
        return parameters | {name: value for name, value in optional.items() if value is not None}

    @asynccontextmanager
    async def request(self, more_s: float = 0.0) -> AsyncIterator[None]:
        """Surrounds one request: limits their number and its time, to which `more_s` is added.

        The SDK limits the reading of a stream by the requested time, but not if the stream stalls.
        """
        async with self._slots, self.translated(), asyncio.timeout(self.access.request_timeout_s + more_s):
            yield

    @asynccontextmanager
    async def translated(self) -> AsyncIterator[None]:
        """Surrounds calls of the SDK, and turns their exceptions into CloudFailure.

        A cancellation during the block is always raised. The SDK mistakes it for a timeout, and its HTTP client's
        `asyncio.wait_for` loses one that comes with the answer (before CPython 3.12). The task would go on, and a loop
        that its owner has cancelled would never end.
        """
        task = asyncio.current_task()
        assert task is not None
        cancellations = task.cancelling()  # a task that was cancelled before may be cleaning up
        try:
            yield
        except Exception as error:
            if task.cancelling() > cancellations:
                raise asyncio.CancelledError from None
            if isinstance(error, CloudFailure):
                raise
            raise _translated(error, self.harmless(str(error))) from None
        if task.cancelling() > cancellations:
            raise asyncio.CancelledError

    def harmless(self, text: str) -> str:
        """Returns the beginning of the text as one line, without the key or anything that looks like one."""
        for secret in _SECRETS:
            text = secret.sub("***", text[:_READ_CHARS].replace(self.access.api_key, "***"))
        return "".join(char if char.isprintable() else " " for char in text)[:_SHOWN_CHARS].strip()


# ---------------------------------------------------------------------------------------------------------------------
# Errors of the SDK


class _NeverRaised(Exception):
    """Stands for an exception that this version of the SDK does not have."""


def _of_sdk(name: str) -> type[Exception]:
    kind: type[Exception] = getattr(e2b, name, _NeverRaised)
    return kind


class _Row(NamedTuple):
    raised: type[Exception]
    make: Callable[[str], CloudFailure]
    text: str


# The first row that fits counts. {} is the SDK's text.
_TABLE = (
    _Row(_of_sdk("AuthenticationException"), KeyRefused, "the API key, or a token for one sandbox, is refused: {}"),
    _Row(_of_sdk("NotFoundException"), Missing, "E2B knows no such thing: {}"),
    _Row(_of_sdk("SandboxNotRunningException"), NotRunning, "the sandbox does not run: {}"),
    _Row(_of_sdk("TimeoutException"), Unanswered, "E2B does not answer in time: {}"),
    _Row(_of_sdk("InvalidArgumentException"), Final, "E2B refuses the request: {}"),
    _Row(_of_sdk("NotEnoughSpaceException"), Final, "the sandbox has no space left: {}"),
    _Row(_of_sdk("GuestUnresponsiveException"), CannotWake, "the sandbox can't be woken: {}"),
    _Row(_of_sdk("TemplateException"), Final, "the template is too old for the SDK: {}"),
    _Row(httpx.TimeoutException, Unanswered, "E2B does not answer in time: {}"),
    _Row(httpx.TransportError, Unanswered, "E2B can't be reached: {}"),
    _Row(TimeoutError, Unanswered, "E2B does not answer in time: {}"),  # an OSError; `request` raises it, too
    _Row(OSError, Unanswered, "E2B can't be reached: {}"),
)
_BUSY = (_of_sdk("RateLimitException"), _of_sdk("ServiceBusyException"))


def _translated(error: Exception, text: str) -> CloudFailure:
    if isinstance(error, _BUSY):
        return TryLater(f"E2B asks for patience: {text}", _retry_after_s(error))
    for row in _TABLE:
        if isinstance(error, row.raised):
            return row.make(row.text.format(text).removesuffix(": "))  # some errors have no text
    status = getattr(error, "status_code", None)
    if status in _REFUSALS and status not in _NOT_NOW:
        return (Missing if status == _NOT_FOUND else Final)(f"E2B refuses the request: {text}")
    if status in _FAILURES:
        return Failed(f"E2B failed: {text}")
    return CloudFailure(f"E2B's answer is of no use: {type(error).__name__}: {text}")


def _retry_after_s(error: Exception) -> float | None:
    """Reads the Retry-After header, which the SDK does not expose, from the frames that handled the answer."""
    for frame, _ in walk_tb(error.__traceback__):
        headers = getattr(frame.f_locals.get("res"), "headers", None)
        if headers is not None:
            delay = str(headers.get("Retry-After", ""))
            return float(delay) if _SECONDS.fullmatch(delay) else None
    return None


def _listed(info: e2b.SandboxInfo) -> Listed:
    return Listed(_checked(info.sandbox_id), dict(info.metadata), info.state == e2b.SandboxState.PAUSED)


def _checked(cloud_id: str) -> str:
    """Checks an id from the cloud, which becomes part of addresses. Raises CloudFailure."""
    if not _CLOUD_ID.fullmatch(cloud_id):
        raise CloudFailure("E2B calls a sandbox by something that is no id")
    return cloud_id


def _collected(texts: list[str]) -> Callable[[str], None]:
    """Returns a receiver of output that keeps the beginning only."""

    def take(text: str) -> None:
        if sum(map(len, texts)) < _READ_CHARS:
            texts.append(text[:_READ_CHARS])

    return take


def _ignored(_text: str) -> None:
    """Receives output that is not read."""
