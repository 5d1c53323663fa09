"""E2B's cloud, by its SDK: the only file that knows the SDK.

Every call ends in an answer or in one of failures.py, by one table. The SDK tells of trouble with its own exceptions,
with those of the three libraries below it, and of answers that are none with whatever its code then stumbles over
(KeyError, JSONDecodeError, a bare Exception); what it says in them comes from the cloud. So no text of it goes further
that has not lost everything secret first, and neither do the exceptions: their frames hold the key.

The key is handed to the SDK with each call. It goes to the cloud's own interface, never to a sandbox: what speaks to a
sandbox is shown a token that is good for this sandbox only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import signature
from traceback import walk_tb
from typing import Any, NamedTuple

import e2b
import httpx
from e2b.sandbox_async.commands.command import Commands

from executor_server.backends.e2b.failures import (
    CannotWake,
    CloudFailure,
    CommandFailed,
    Failed,
    Final,
    Gone,
    KeyRefused,
    NotRunning,
    TryLater,
    Unanswered,
)

_ROOT = "root"
_PAGE_SANDBOXES = 100
# All of its memory has to be written down.
_PAUSE_MORE_S = 60.0
_MAX_PAGES = 100
_SHOWN_CHARS = 200
_READ_CHARS = 8_192
# In the stream of a command: far more than what one read of its output brings.
_MESSAGE_BYTES_MAX = 4 * 2**20
_CLOUD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
# Keys and tokens, which are long; and what stands before the host of an address. No id of a sandbox is so long.
_SECRETS = (re.compile(r"[A-Za-z0-9+/=_-]{32,}"), re.compile(r"(?<=//)[^/@\s]*(?=@)"))
_SECONDS = re.compile(r"[0-9]{1,6}", re.ASCII)
_NOT_FOUND = 404
# Statuses of refusals that repeating won't change. Others of the kind say "not now".
_REFUSALS = range(400, 500)
_FAILURES = range(500, 600)
_NOT_NOW = frozenset({408, 409, 423, 425, 429})


def missing_options() -> list[str]:
    """What the installed SDK does not offer, and this backend can't do without: it is too old."""
    needed: tuple[tuple[Callable[..., object], tuple[str, ...]], ...] = (
        (e2b.AsyncSandbox.create, ("idempotency_key", "allow_internet_access", "metadata")),
        # Without it, all that ever came from a guest would stay in memory.
        (Commands.run, ("retain_output",)),
        (e2b.ConnectionConfig, ("retries", "api_url", "sandbox_url")),
    )
    return [name for function, names in needed for name in names if name not in signature(function).parameters]


@dataclass(frozen=True)
class Access:
    """How the cloud is reached."""

    api_key: str = field(repr=False)
    api_url: str | None  # None: as the SDK's own environment variables say
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
    """A sandbox that was running a moment ago, and what can be done inside it."""

    def __init__(self, cloud: Cloud, sandbox: e2b.AsyncSandbox) -> None:
        self._cloud = cloud
        self._sandbox = sandbox
        self.cloud_id = _checked(sandbox.sandbox_id)
        # The SDK would take a message of any length into memory, and has no setting for what its own library can bound.
        rpc: Any = getattr(sandbox.commands, "_rpc", None)
        if hasattr(rpc, "_read_max_bytes"):
            rpc._read_max_bytes = _MESSAGE_BYTES_MAX

    async def upload(self, path: str, data: bytes) -> None:
        """Makes the file and the directories above it, root's. Raises CloudFailure."""
        async with self._cloud.request():
            await self._sandbox.files.write(path, data, user=_ROOT)

    async def run(self, command: str, *, timeout_s: float) -> str:
        """What the command, run by root, writes to its standard output, or the beginning of it.

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
        """Starts one that runs as long as it likes, as root. Raises CloudFailure."""
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
        return RunningCommand(self._cloud, handle)


class RunningCommand:
    """A command that the daemon talks with. Implements `transport.RelayCommand`."""

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
        self._turns = asyncio.Semaphore(access.concurrency)
        # It would write down every request, with its address.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    async def create(
        self, template: str, *, lifetime_s: float, metadata: Mapping[str, str], request_id: str
    ) -> Machine:
        """Makes a sandbox. `request_id`: the cloud makes one for equal ids, however often it is asked.

        Raises Gone when there is no such template, TryLater when there is no room. Where the answer was lost, there
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
        """Wakes it if it is paused; lets it live for `lifetime_s` at least. Raises Gone, CloudFailure."""
        async with self.request():
            sandbox = await e2b.AsyncSandbox.connect(cloud_id, timeout=math.ceil(lifetime_s), **self._parameters())
        if sandbox.sandbox_id != cloud_id:
            raise CloudFailure("E2B answers for another sandbox than it was asked for")
        return Machine(self, sandbox)

    async def list(self, metadata: Mapping[str, str]) -> list[Listed]:
        """All that have this metadata, running or paused. Raises CloudFailure."""
        listed: list[Listed] = []
        pages = e2b.AsyncSandbox.list(
            query=e2b.SandboxQuery(metadata=dict(metadata)), limit=_PAGE_SANDBOXES, **self._parameters()
        )
        for _ in range(_MAX_PAGES):
            async with self.request():
                found = await pages.next_items()
                listed += [_listed(one) for one in found]
            if not pages.has_next:
                # A cloud that does not know the filter must not make us kill other people's sandboxes.
                return [one for one in listed if metadata.items() <= one.metadata.items()]
        raise CloudFailure(f"the list of sandboxes does not end after {_MAX_PAGES} pages")

    async def kill(self, cloud_id: str) -> bool:
        """Whether there was one. Raises CloudFailure."""
        async with self.request():
            return await e2b.AsyncSandbox.kill(cloud_id, **self._parameters())

    async def prolong(self, cloud_id: str, *, lifetime_s: float) -> None:
        """It ends so long after now, and no sooner or later. Raises Gone, CloudFailure."""
        async with self.request():
            await e2b.AsyncSandbox.set_timeout(cloud_id, math.ceil(lifetime_s), **self._parameters())

    async def look(self, cloud_id: str) -> Listed:
        """What the cloud has to say of it. Raises Gone, CloudFailure."""
        async with self.request():
            return _listed(await e2b.AsyncSandbox.get_info(cloud_id, **self._parameters()))

    async def pause(self, cloud_id: str) -> bool:
        """With all that is in its memory. Whether it was running until now. Raises Gone, CloudFailure.

        Final when the cloud refuses: for this template or account it is not possible.
        """
        timeout_s = self.access.request_timeout_s + _PAUSE_MORE_S
        async with self.request(_PAUSE_MORE_S):
            return await e2b.AsyncSandbox.pause(cloud_id, **{**self._parameters(), "request_timeout": timeout_s})

    def _parameters(self) -> Any:
        """Of each call."""
        access = self.access
        parameters: dict[str, object] = {
            "api_key": access.api_key,
            "request_timeout": access.request_timeout_s,
            "retries": 0,  # what may be repeated, and how often, is decided in one place: patience.py
            "debug": False,  # whatever the environment says: it would make the SDK speak with no cloud at all
        }
        optional = {"api_url": access.api_url, "sandbox_url": access.sandbox_url}
        return parameters | {name: value for name, value in optional.items() if value is not None}

    @asynccontextmanager
    async def request(self, more_s: float = 0.0) -> AsyncIterator[None]:
        """Around one that takes a turn, and may take `more_s` longer than others.

        The SDK bounds the reading of a stream by what the cloud is asked for, and so not where that stands still.
        """
        async with self._turns, self.translated(), asyncio.timeout(self.access.request_timeout_s + more_s):
            yield

    @asynccontextmanager
    async def translated(self) -> AsyncIterator[None]:
        """Around whatever the SDK does: it raises CloudFailure."""
        try:
            yield
        except CloudFailure:
            raise
        except Exception as error:  # noqa: BLE001 - the SDK's border: the head of this file says what comes across
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # which the SDK takes for an answer that is late
                raise asyncio.CancelledError from None
            raise _translated(error, self.harmless(str(error))) from None

    def harmless(self, text: str) -> str:
        """The beginning of it as one line, without the key or anything that looks like one."""
        for secret in _SECRETS:
            text = secret.sub("***", text[:_READ_CHARS].replace(self.access.api_key, "***"))
        return "".join(char if char.isprintable() else " " for char in text)[:_SHOWN_CHARS].strip()


# ---------------------------------------------------------------------------------------------------------------------
# What the SDK raises


class _Unheard(Exception):
    """In the place of one that the SDK of this version does not have."""


def _of_sdk(name: str) -> type[Exception]:
    kind: type[Exception] = getattr(e2b, name, _Unheard)
    return kind


class _Row(NamedTuple):
    raised: type[Exception]
    make: Callable[[str], CloudFailure]
    says: str


# In this order: of those that fit, the first counts. {} is what the SDK says.
_TABLE = (
    _Row(_of_sdk("AuthenticationException"), KeyRefused, "the API key, or a token for one sandbox, is refused: {}"),
    _Row(_of_sdk("NotFoundException"), Gone, "E2B knows no such thing: {}"),
    _Row(_of_sdk("SandboxNotRunningException"), NotRunning, "the sandbox does not run: {}"),
    _Row(_of_sdk("TimeoutException"), Unanswered, "E2B does not answer in time: {}"),
    _Row(_of_sdk("InvalidArgumentException"), Final, "E2B refuses the request: {}"),
    _Row(_of_sdk("NotEnoughSpaceException"), Final, "the sandbox has no space left: {}"),
    _Row(_of_sdk("GuestUnresponsiveException"), CannotWake, "the sandbox can't be woken: {}"),
    _Row(_of_sdk("TemplateException"), Final, "the template is too old for the SDK: {}"),
    _Row(httpx.TimeoutException, Unanswered, "E2B does not answer in time: {}"),
    _Row(httpx.TransportError, Unanswered, "E2B can't be reached: {}"),
    _Row(OSError, Unanswered, "E2B can't be reached: {}"),
)
_BUSY = (_of_sdk("RateLimitException"), _of_sdk("ServiceBusyException"))


def _translated(error: Exception, said: str) -> CloudFailure:
    if isinstance(error, _BUSY):
        return TryLater(f"E2B asks for patience: {said}", _retry_after_s(error))
    for row in _TABLE:
        if isinstance(error, row.raised):
            return row.make(row.says.format(said))
    status = getattr(error, "status_code", None)
    if status in _REFUSALS and status not in _NOT_NOW:
        return (Gone if status == _NOT_FOUND else Final)(f"E2B refuses the request: {said}")
    if status in _FAILURES:
        return Failed(f"E2B failed: {said}")
    return CloudFailure(f"E2B's answer is of no use: {type(error).__name__}: {said}")


def _retry_after_s(error: Exception) -> float | None:
    """What Retry-After says. The SDK keeps it to itself; the frames that the answer came through still have it."""
    for frame, _ in walk_tb(error.__traceback__):
        headers = getattr(frame.f_locals.get("res"), "headers", None)
        if headers is not None:
            delay = str(headers.get("Retry-After", ""))
            return float(delay) if _SECONDS.fullmatch(delay) else None
    return None


def _listed(info: e2b.SandboxInfo) -> Listed:
    return Listed(_checked(info.sandbox_id), dict(info.metadata), info.state == e2b.SandboxState.PAUSED)


def _checked(cloud_id: str) -> str:
    """It becomes part of addresses. Raises CloudFailure."""
    if not _CLOUD_ID.fullmatch(cloud_id):
        raise CloudFailure("E2B calls a sandbox by something that is no id")
    return cloud_id


def _collected(texts: list[str]) -> Callable[[str], None]:
    """Takes output, as long as there is not much of it."""

    def take(text: str) -> None:
        if sum(map(len, texts)) < _READ_CHARS:
            texts.append(text[:_READ_CHARS])

    return take


def _ignored(_text: str) -> None:
    """Nobody reads it."""
