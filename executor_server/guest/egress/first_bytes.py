"""The first bytes in a tunnel: they must be for the name that its CONNECT was checked for.

A tunnel to an allowed name ends at an address that often serves many names: a server behind it picks one by the server
name of the ClientHello. So the first bytes are held until they name the host of the CONNECT. The ClientHello is read by
OpenSSL itself: an own parser would read some other one than servers do. (Requests without TLS, on port 80, are not
spliced at all: forward.py reads and writes them.)

What this can't check: the requests inside of TLS (their Host may differ where the server allows it; rules with
secrets, methods or paths terminate TLS for that), the inner name of an encrypted ClientHello, and a second ClientHello
after a HelloRetryRequest.
"""

from __future__ import annotations

import ssl
import sys
from typing import Any, Optional, Protocol

from . import reasons
from .names import BadName, Target, canonical_host
from .protocols import Limits
from .refusals import Refusal, shown

_HANDSHAKE_RECORD = b"\x16"
HTTPS_PORT = 443


class FirstBytes(Protocol):
    """Reads the first bytes of a client. Does no I/O."""

    required: bool  # the client speaks first, and soon

    def feed(self, data: bytes) -> bool:
        """True: all that was fed may pass. False: more is needed to decide. Raises Refusal."""


def check_for(target: Target, limits: Limits) -> FirstBytes:
    return ServerName(target, limits.head_bytes, required=target.port == HTTPS_PORT)


class ServerName:
    """The ClientHello's server name is the name of the CONNECT, and TLS 1.2 or newer is offered."""

    def __init__(self, target: Target, limit_bytes: int, *, required: bool) -> None:
        self.required = required
        self._target = target
        self._left = limit_bytes
        self._hello: Optional[_Hello] = None

    def feed(self, data: bytes) -> bool:
        if self._hello is None:
            if not data.startswith(_HANDSHAKE_RECORD):
                if not self.required:
                    return True
                raise Refusal(reasons.SERVER_NAME, f"{self._target} expects TLS, and the client sent something else")
            self._hello = _Hello()
        self._left -= len(data)
        try:
            complete = self._hello.feed(data)
        except _Unreadable as error:
            raise self._refused(error.reason, error.clause) from error
        if complete:
            self._compare(self._hello.server_name)
        elif self._left <= 0:
            raise self._refused(reasons.SERVER_NAME, "its ClientHello is larger than the proxy reads")
        return complete

    def _compare(self, server_name: Optional[str]) -> None:
        if server_name is None:
            if self._target.is_address:
                return  # addresses are no server names
            raise self._refused(reasons.SERVER_NAME, "its ClientHello has no server name")
        try:
            same = canonical_host(server_name) == self._target.host
        except BadName:
            same = False
        if not same:
            raise self._refused(reasons.SERVER_NAME, f"its ClientHello names {shown(server_name)} instead")

    def _refused(self, reason: str, clause: str) -> Refusal:
        assert self._hello is not None
        message = f"the connection to {self._target} was closed: {clause}"
        return Refusal(reason, message, parting=self._hello.answer())


class _Unreadable(Exception):
    def __init__(self, reason: str, clause: str) -> None:
        super().__init__(clause)
        self.reason = reason
        self.clause = clause


class _Server(ssl.SSLObject):
    """Notes the server name that the callback is given."""

    asked = False
    server_name: Optional[str] = None


class _Hello:
    """A server's side of a TLS handshake, which is given up as soon as it has read a ClientHello."""

    def __init__(self) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = _CONTEXT.wrap_bio(self._incoming, self._outgoing, server_side=True)
        assert isinstance(server, _Server)
        self._server = server

    @property
    def server_name(self) -> Optional[str]:
        return self._server.server_name

    def feed(self, data: bytes) -> bool:
        """True once the ClientHello is complete. Raises _Unreadable."""
        self._incoming.write(data)
        hook, sys.unraisablehook = sys.unraisablehook, _ignore_names_that_are_not_ascii
        try:
            self._server.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            # The callback ends each handshake that gets as far, so this is also how success looks.
            if self._server.asked:
                return True
            if error.reason in _OLD_TLS:
                raise _Unreadable(reasons.OLD_TLS, "it offers no TLS from version 1.2 on") from error
            raise _Unreadable(reasons.SERVER_NAME, "its ClientHello can't be read") from error
        finally:
            sys.unraisablehook = hook
        raise AssertionError("a handshake without a certificate ended well")

    def answer(self) -> bytes:
        """The alert that OpenSSL has for the client; it makes an error with a name of what would be a bare end."""
        return self._outgoing.read()


_OLD_TLS = {"UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "WRONG_SSL_VERSION"}


def _ignore_names_that_are_not_ascii(unraisable: Any) -> None:
    """`ssl` reports a server name that it can't decode as an exception that no caller can catch: a sandbox could fill
    our log with them. The handshake fails all the same."""
    if not isinstance(unraisable.exc_value, UnicodeDecodeError):
        sys.__unraisablehook__(unraisable)


def _note_server_name(server: Any, server_name: Optional[str], _: ssl.SSLContext) -> int:
    server.asked, server.server_name = True, server_name
    return int(ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslobject_class = _Server
    context.sni_callback = _note_server_name
    return context


_CONTEXT = _context()
