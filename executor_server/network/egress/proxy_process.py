"""The proxy's process, as the daemon starts, configures and ends it.

All its output is read with a bound. Its environment has only the variables that its start needs.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import structlog

from executor_server.backends import UnsupportedArchitecture, unlisted_uid
from executor_server.guest.egress.control_protocol import MAX_COMMAND_BYTES, MAX_REPORT_BYTES, encode
from executor_server.network.egress.interface import EgressError, EgressSettings
from executor_server.network.egress.system_calls import proxy_filter
from executor_server.network.proxy import Link

PROXY_COMMAND = (sys.executable, "-P", "-m", "executor_server.network.proxy")
_START_S = 20.0
_END_S = 2.0
_REAP_S = 5.0
# A proxy with a larger backlog has stopped reading: binding ten thousand sessions takes less.
_MAX_BACKLOG_BYTES = 2**25
_STDERR_BYTES = 4096
# A proxy that was taken over could fill the log.
_MAX_LOGGED_BYTES = 2**20
_MAX_MESSAGE_CHARS = 1000
# Variables that Python, libc and OpenSSL need to start as in the daemon; no credentials are among them.
_KEPT_VARIABLES = (
    *("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)

_log = structlog.get_logger(__name__)

Message = dict[str, Any]


class ProxyProcess:
    """One process from its start to its end. `on_message` is called for each message after `ready`."""

    def __init__(
        self, command: Sequence[str], on_message: Callable[[Message], None], on_end: Callable[[str], None]
    ) -> None:
        """`command` gets the number of a descriptor as an additional argument.

        `on_end` is called once, when a started process has become unusable; `close` it then.
        """
        self._command = command
        self._on_message = on_message
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._stderr: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, settings: EgressSettings, directory: str) -> None:
        """Starts the process, and waits until it is confined. Raises EgressError; `close` it even then."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._ready = asyncio.get_running_loop().create_future()
            self._link = Link(
                ours,
                max_line_bytes=MAX_REPORT_BYTES,
                max_backlog_bytes=_MAX_BACKLOG_BYTES,
                takes_descriptors=False,
                on_message=self._take,
                on_end=self._ended,
            )
            try:
                self._process = _popen(self._command, theirs.fileno())
            except OSError as error:
                raise EgressError(f"The egress proxy can't be started: {error.strerror}.") from error
        self._stderr = asyncio.create_task(_log_stderr(self._process.stderr))
        self._link.send(_settings_message(settings, directory))
        try:
            async with asyncio.timeout(_START_S):
                await self._ready
        except TimeoutError:
            raise EgressError(f"The egress proxy was not ready within {_START_S:g} seconds.") from None

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Sends a message; never blocks. Raises EgressError for a message that is too large, and sends nothing then."""
        line = encode(message if descriptor is None else {**message, "descriptor": True})
        if len(line) > MAX_COMMAND_BYTES:
            raise EgressError(f"The rules of a session's network are larger than {MAX_COMMAND_BYTES:,} bytes.")
        if self._link is not None:
            self._link.send_line(line, descriptor)

    def read_arrived(self) -> None:
        """Handles the messages that have arrived."""
        if self._link is not None:
            self._link.read_arrived()

    async def close(self) -> None:
        """Ends the process and reaps it; a healthy process ends when the link closes. Idempotent."""
        if self._link is not None:
            self._link.close()
            self._link = None
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await _reap(process, _END_S)
        except TimeoutError:
            process.kill()
            await _reap(process, _REAP_S)
        assert self._stderr is not None
        await self._stderr
        if process.returncode != 0:
            _log.warning("egress_proxy_ended", exit_code=process.returncode)

    def _take(self, message: Message, _descriptor: int | None) -> None:
        assert self._ready is not None
        if self._ready.done():
            self._on_message(message)
        elif message["type"] == "ready":
            self._ready.set_result(None)
        else:
            text = message.get("message")
            why = text[:_MAX_MESSAGE_CHARS] if isinstance(text, str) else "The egress proxy did not start."
            self._ready.set_exception(EgressError(why))

    def _ended(self, why: str) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(EgressError(f"The egress proxy did not start: {why}. The log has its output."))
        elif not self._ready.cancelled() and self._ready.exception() is None:
            self._on_end(why)


def _popen(command: Sequence[str], link: int) -> subprocess.Popen[bytes]:
    """Starts the process with that descriptor. Blocks for some milliseconds. Raises OSError.

    Uses `subprocess`, which calls vfork. uvloop starts asyncio's subprocesses with a fork that runs the fork handlers
    of all libraries in the child, and gRPC's crash there while its threads are busy (one start in five of a daemon with
    the Docker backend). Runs in the loop's thread, because the kernel kills the process when its starting thread ends.
    """
    return subprocess.Popen(
        [*command, str(link)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(link,),
        env=_environment(os.environ),
        # Control-C at a terminal is for the daemon, which drains its sessions first.
        start_new_session=True,
    )


async def _reap(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Waits until the process has ended, and reaps it. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    with contextlib.ExitStack() as stack:
        pidfd = os.pidfd_open(process.pid)  # not reaped yet, so the number is still this process's
        stack.callback(os.close, pidfd)
        loop.add_reader(pidfd, ended.set)
        stack.callback(loop.remove_reader, pidfd)
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    process.wait()


async def _log_stderr(pipe: IO[bytes] | None) -> None:
    """Logs the process's stderr, and reads it to the end, so that the process never blocks.

    Its own messages have no text of a sandbox (network/proxy/server.py); other text is escaped.
    """
    assert pipe is not None
    stream = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    with contextlib.closing(transport):
        logged_bytes = 0
        while data := await stream.read(_STDERR_BYTES):
            logged_bytes += len(data)
            if logged_bytes <= _MAX_LOGGED_BYTES:
                _log.error("egress_proxy_said", stderr=data.decode("utf-8", "replace").strip())


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    # Each thread that resolves a name would get an arena of its own from glibc.
    return {"MALLOC_ARENA_MAX": "2"} | {name: environ[name] for name in _KEPT_VARIABLES if name in environ}


def _settings_message(settings: EgressSettings, directory: str) -> Message:
    return {
        "type": "start",
        "directory": directory,
        "has_secrets": bool(settings.secrets),
        "internal": list(settings.internal),
        "resolver": list(settings.resolver),
        "upstream_proxy": settings.upstream_proxy,
        "upstream_resolves": settings.upstream_resolves,
        "ca_file": None if settings.ca_file is None else str(settings.ca_file),
        "uid": unlisted_uid() if os.geteuid() == 0 else None,
        "seccomp": _seccomp(),
    }


def _seccomp() -> str | None:
    try:
        return base64.b64encode(proxy_filter()).decode("ascii")
    except UnsupportedArchitecture as error:
        _log.warning("egress_proxy_without_filter", reason=str(error))
        return None
