"""The proxy's process: takes settings and secrets from the daemon, confines itself, and serves until the daemon ends.

Theory of operation. The process gets one end of a socket pair. The daemon's first message has the settings. The process
then reads the files that only the daemon's user can read, imports everything that it will need, gives up its privileges
(confinement.py), and answers `ready`. From then on it follows the control protocol (guest/egress/control_protocol.py),
with two more messages:

    secret   name                       one secret, with its file, which the daemon has opened and checked
    secrets  number, count, partial     all were sent: use them. If some are unusable, `failed` lists them and nothing
                                        changes, except that with `partial` the usable ones are used

When the link ends, the process ends at once: without a daemon, nothing would be counted or recorded.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import ssl
import sys
import traceback
from pathlib import Path
from typing import Any

import uvloop

from executor_server.guest.egress import reasons
from executor_server.guest.egress.addresses import AddressRules
from executor_server.guest.egress.connection import Connection
from executor_server.guest.egress.control_protocol import MAX_COMMAND_BYTES, ControlError, ControlServer, encode
from executor_server.guest.egress.host_resolver import HostResolver
from executor_server.guest.egress.own_addresses import OwnAddresses
from executor_server.guest.egress.protocols import Resolver, Terminator
from executor_server.guest.egress.proxy import Proxy
from executor_server.guest.egress.refusals import Refusal
from executor_server.network.proxy.confinement import Confinement, confine
from executor_server.network.proxy.connector import UpstreamProxy
from executor_server.network.proxy.link import Link, Message
from executor_server.network.proxy.resolvers import DnsResolver
from executor_server.network.proxy.secrets import BadSecret, Secrets, read_secret
from executor_server.network.proxy.server_names import ignore_unreadable_names

START_S = 10.0
# Reports that the daemon has not read. If the daemon stops reading, nothing is recorded, so no session may go on.
_MAX_BACKLOG_BYTES = 2**23
_SHOWN_PROBLEMS = 8


class Unusable(Exception):
    """The settings can't be used; the message is a sentence for the administrator."""


class Parts:
    """The parts that are created before the confinement, from files that only the daemon's user may read."""

    def __init__(self, settings: Message) -> None:
        """Raises Unusable."""
        self.secrets = Secrets()
        self.terminator = _terminator(settings, self.secrets) if settings["has_secrets"] else NoTerminator()
        self.classifier = AddressRules(settings["internal"], OwnAddresses())
        self.resolver = self._resolver(settings)
        self.connector = UpstreamProxy(settings["upstream_proxy"]) if settings["upstream_proxy"] else None

    def _resolver(self, settings: Message) -> Resolver | None:
        "a.invalid".encode("idna")  # the codec is imported with its first use, by getaddrinfo
        if settings["upstream_resolves"]:
            return None
        return DnsResolver(settings["resolver"]) if settings["resolver"] else HostResolver()


class NoTerminator:
    """The terminator of a configuration without secrets."""

    async def terminate(self, tunnel: Connection) -> None:
        """Raises Refusal."""
        message = f"requests to {tunnel.target} need a secret that the proxy does not have"
        raise Refusal(reasons.SECRET_MISSING, message)


def _terminator(settings: Message, secrets: Secrets) -> Terminator:
    """Raises Unusable."""
    # Imported here: `cryptography` is a third of the process's memory, and most policies have no secrets.
    from executor_server.network.proxy.authority import Authority, AuthorityError
    from executor_server.network.proxy.terminator import TlsTerminator, upstream_context

    try:
        authority = Authority.read(Path(settings["directory"]))
        authority.context_for("a.invalid")  # imports and opens everything that the first certificate needs
    except AuthorityError as error:
        raise Unusable(str(error)) from error
    try:
        context = upstream_context(settings["ca_file"])
    except (OSError, ssl.SSLError) as error:
        why = "holds no certificates" if isinstance(error, ssl.SSLError) else f"can't be read: {error.strerror}"
        raise Unusable(f"The file {settings['ca_file']} of egress.ca_file {why}.") from error
    return TlsTerminator(authority, context, secrets)


class Server:
    """Serves the daemon's end of the link."""

    def __init__(self, sock: socket.socket, parts: Parts) -> None:
        self._parts = parts
        self._read: dict[str, str] = {}
        self._problems: list[str] = []
        self._link = Link(
            sock,
            max_line_bytes=MAX_COMMAND_BYTES,
            max_backlog_bytes=_MAX_BACKLOG_BYTES,
            takes_descriptors=True,
            on_message=self._handle,
            on_end=self._end,
        )
        self._control = ControlServer(self._link.send_line, lambda: self._link.backlog_bytes)
        self._proxy = Proxy(
            resolver=parts.resolver,
            classifier=parts.classifier,
            reporter=self._control,
            connector=parts.connector,
            terminator=parts.terminator,
        )
        self._control.drive(self._proxy)
        self._link.send({"type": "ready"})

    def _handle(self, message: Message, descriptor: int | None) -> None:
        if message["type"] == "secret" and descriptor is not None:
            self._take_secret(str(message["name"]), descriptor)
        elif message["type"] == "secrets":
            self._use_secrets(message)
        else:
            listener = None if descriptor is None else socket.socket(fileno=descriptor)
            self._control.handle(message, listener)

    def _end(self, _why: str) -> None:
        """Ends the process, since the daemon is gone; an exception could be delayed, and connections would go on."""
        self._proxy.dismiss_held("the daemon that asks for it has ended; try again")
        os._exit(0)

    def _take_secret(self, name: str, descriptor: int) -> None:
        try:
            self._read[name] = read_secret(descriptor)
        except BadSecret as error:
            self._problems.append(f"the file of egress.secrets.{name} {error}")

    def _use_secrets(self, message: Message) -> None:
        read, self._read = self._read, {}
        problems, self._problems = self._problems, []
        if not problems or message["partial"]:
            self._parts.secrets.replace(read)
        if problems:
            text = "; ".join(problems[:_SHOWN_PROBLEMS])
            self._link.send({"type": "failed", "number": message["number"], "message": text})
        else:
            self._link.send({"type": "done", "number": message["number"]})


def serve(descriptor: int) -> int:
    """Serves the daemon at the other end of the descriptor. Returns the exit code of a failed start."""
    sys.unraisablehook = ignore_unreadable_names
    sys.excepthook = _report_without_text
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    try:
        settings = _read_settings(sock)
        parts = Parts(settings)
        seccomp = base64.b64decode(settings["seccomp"]) if settings["seccomp"] is not None else None
        try:
            confine(Confinement(settings["uid"], seccomp))
        except OSError as error:
            raise Unusable(f"The egress proxy can't give up its privileges: {error.strerror}.") from error
    except Unusable as error:
        sock.sendall(encode({"type": "failed", "number": 0, "message": str(error)}))
        return 1
    uvloop.run(_serve(sock, parts))
    return 1  # only a loop that was stopped gets here


async def _serve(sock: socket.socket, parts: Parts) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report_context)
    server = Server(sock, parts)
    await loop.create_future()
    del server


def _read_settings(sock: socket.socket) -> Message:
    """Reads the first line byte by byte: later messages come with descriptors and belong to the link."""
    sock.settimeout(START_S)
    line = b""
    while not line.endswith(b"\n"):
        byte = sock.recv(1)
        if not byte or len(line) > MAX_COMMAND_BYTES:
            raise SystemExit(1)
        line += byte
    settings: Any = json.loads(line)
    if not isinstance(settings, dict) or settings.get("type") != "start":
        raise ControlError("the first message is not `start`")
    return settings


def _report_without_text(kind: type[BaseException], _error: BaseException, trace: Any) -> None:
    """Reports where an exception was raised. Its text may come from a sandbox, so the daemon's log must not have it."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)][-8:]
    where = "; ".join(f"{code.co_filename}:{line} {code.co_name}" for code, line in frames)
    sys.stderr.write(f"{kind.__name__} at {where}\n")


def _report_context(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    sys.stderr.write(f"{str(context.get('message'))[:200]}{': ' if error else chr(10)}")  # one line in all
    if error is not None:
        _report_without_text(type(error), error, error.__traceback__)
