"""Checks the first bytes in a tunnel: they must be for the name of its CONNECT.

A tunnel to an allowed name ends at an address that often serves many names: a server behind it picks one by the server
name of the ClientHello. So the first bytes are held until they name the host of the CONNECT. The ClientHello is read by
OpenSSL itself: a parser of our own would read some of them differently than servers do. (Requests without TLS, on port
80, are not spliced at all: forward.py reads and writes them.)

A server of TLS 1.3 may answer the first ClientHello with a HelloRetryRequest, and then serves the name of the second
one. So the client's records are read on until the server has sent its ServerHello, and each ClientHello among them is
held until it was checked, whatever stands between them. Messages are put together here and not left to OpenSSL: a
client may cut one into many records, or put two into one.

What this can't check: the requests inside of TLS (their Host may differ where the server allows it; rules with
secrets, methods or paths terminate TLS for that), a renegotiation of TLS 1.2, which is inside too, and the inner name
of an encrypted ClientHello.
"""

from __future__ import annotations

import ssl
import sys
from typing import Any, Iterator, Optional, Tuple

from . import reasons
from .host_names import BadName, Target, canonical_host
from .refusals import Refusal, shown

HTTPS_PORT = 443
# TLS records: their types, and the most that one may hold.
_HANDSHAKE, _RECORD_TYPES = 22, (20, 21, 22, 23)  # besides: change of cipher, alert, application data
_RECORD_HEAD_BYTES = 5
_RECORD_BYTES = 2**14
_ENCRYPTED_BYTES = _RECORD_BYTES + 2048
# Messages of the handshake: type and length, and in a ServerHello the version and the random.
_MESSAGE_HEAD_BYTES = 4
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
_RANDOM = slice(6, 38)
# RFC 8446, section 4.1.3: SHA-256 of "HelloRetryRequest".
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


class FirstBytes:
    """Reads the first bytes of both sides, and does no I/O.

    Each ClientHello's server name must be the name of the CONNECT, and TLS 1.2 or newer must be offered.
    """

    def __init__(self, target: Target, limit_bytes: int) -> None:
        self.required = target.port == HTTPS_PORT  # the client speaks first, and soon
        self.done = False  # nothing that follows needs a check
        self._target = target
        self._limit_bytes = limit_bytes
        self._records: Optional[_Records] = None
        self._answer = _Answer()
        self._message = b""  # the beginning of a ClientHello, or nothing
        self._held_bytes = 0
        self._was_checked = False  # the first one

    def feed(self, data: bytes) -> bool:
        """True: all that was fed may pass. False: more is needed to decide. Raises Refusal."""
        if self._records is None:
            if data[0] != _HANDSHAKE:
                if not self.required:
                    self.done = True
                    return True
                raise Refusal(reasons.SERVER_NAME, f"{self._target} expects TLS, and the client sent something else")
            self._records = _Records()
        try:
            for kind, piece in self._records.feed(data):
                if kind == _HANDSHAKE:
                    self._message += piece
                    self._take_messages()
                elif not self._was_checked:
                    raise _Unreadable("its ClientHello can't be read")
        except _Unreadable as error:
            raise self._refused(reasons.SERVER_NAME, str(error)) from error
        if self._was_checked and not self._message:
            self._held_bytes = 0
            return True
        self._held_bytes += len(data)
        if self._held_bytes >= self._limit_bytes:
            raise self._refused(reasons.SERVER_NAME, "its ClientHello is larger than the proxy reads")
        return False

    def feed_answer(self, data: bytes) -> None:
        """Takes bytes of the server, before they pass."""
        if self._was_checked and not self.done:  # earlier bytes answer no ClientHello
            self.done = self._answer.feed(data)

    def _take_messages(self) -> None:
        while len(self._message) >= _MESSAGE_HEAD_BYTES:
            size = _MESSAGE_HEAD_BYTES + int.from_bytes(self._message[1:_MESSAGE_HEAD_BYTES], "big")
            if self._message[0] != _CLIENT_HELLO:
                raise _Unreadable("its ClientHello can't be read")
            if len(self._message) < size:
                return
            self._check(_Hello(self._message[:size]))
            self._message = self._message[size:]
            self._was_checked = True

    def _check(self, hello: _Hello) -> None:
        if hello.refusal:
            raise self._refused(*hello.refusal, parting=hello.answer())
        name = hello.server_name
        if name is None:
            if self._target.is_address:
                return  # an address is not a server name
            raise self._refused(reasons.SERVER_NAME, "its ClientHello has no server name", parting=hello.answer())
        try:
            same = canonical_host(name) == self._target.host
        except BadName:
            same = False
        if not same:
            clause = f"its ClientHello names {shown(name)} instead"
            raise self._refused(reasons.SERVER_NAME, clause, parting=hello.answer())

    def _refused(self, reason: str, clause: str, parting: bytes = b"") -> Refusal:
        return Refusal(reason, f"the connection to {self._target} was closed: {clause}", parting=parting)


class _Unreadable(Exception):
    """The stream is not TLS; the message is a clause."""


class _Server(ssl.SSLObject):
    """Notes the server name that the callback is given."""

    asked = False
    server_name: Optional[str] = None


class _Hello:
    """A server's side of a TLS handshake, which gets one ClientHello and is then abandoned."""

    def __init__(self, message: bytes) -> None:
        self.refusal: Optional[Tuple[str, str]] = None  # a reason and a clause
        incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        for start in range(0, len(message), _RECORD_BYTES):
            piece = message[start : start + _RECORD_BYTES]
            incoming.write(b"\x16\x03\x01" + len(piece).to_bytes(2, "big") + piece)
        incoming.write_eof()
        server = _CONTEXT.wrap_bio(incoming, self._outgoing, server_side=True)
        assert isinstance(server, _Server)
        hook, sys.unraisablehook = sys.unraisablehook, _ignore_names_that_are_not_ascii
        try:
            server.do_handshake()
        except ssl.SSLError as error:
            # The callback ends each handshake that gets that far, so success raises this, too.
            if error.reason in _OLD_TLS:
                self.refusal = reasons.OLD_TLS, "it offers no TLS from version 1.2 on"
            elif not server.asked:
                self.refusal = reasons.SERVER_NAME, "its ClientHello can't be read"
        finally:
            sys.unraisablehook = hook
        self.server_name = server.server_name

    def answer(self) -> bytes:
        """Returns OpenSSL's alert for the client, which then sees a named error and not just an end."""
        return self._outgoing.read()


class _Records:
    """Cuts a stream into the contents of its TLS records, and keeps none of them."""

    def __init__(self) -> None:
        self._head = b""
        self._kind = self._left = 0

    def feed(self, data: bytes) -> Iterator[Tuple[int, bytes]]:
        """Yields types and pieces of content. Raises _Unreadable."""
        at = 0
        while at < len(data):
            if not self._left:
                head = data[at : at + _RECORD_HEAD_BYTES - len(self._head)]
                self._head += head
                at += len(head)
                if len(self._head) < _RECORD_HEAD_BYTES:
                    return
                self._kind, major, _, *length = self._head
                self._left, self._head = int.from_bytes(length, "big"), b""
                if self._kind not in _RECORD_TYPES or major != 3 or self._left > _ENCRYPTED_BYTES:
                    raise _Unreadable("it sends something else than TLS")
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if piece:
                yield self._kind, piece


class _Answer:
    """Finds the server's ServerHello."""

    def __init__(self) -> None:
        self._records = _Records()
        self._message = b""  # the beginning of one
        self._skipped = 0  # bytes of the present message that are still to be skipped

    def feed(self, data: bytes) -> bool:
        """True once the server has sent its ServerHello, so that it takes no further ClientHello."""
        try:
            for kind, piece in self._records.feed(data):
                if kind == _HANDSHAKE and self._has_hello(piece):
                    return True
        except _Unreadable:  # it does not speak TLS
            return True
        return False

    def _has_hello(self, piece: bytes) -> bool:
        while piece:
            if self._skipped:
                skipped = min(self._skipped, len(piece))
                self._skipped -= skipped
                piece = piece[skipped:]
                continue
            taken = piece[: _RANDOM.stop - len(self._message)]
            self._message += taken
            piece = piece[len(taken) :]
            if len(self._message) < _RANDOM.stop:
                continue
            if self._message[0] != _SERVER_HELLO or self._message[_RANDOM] != _RETRY:
                return True
            size = _MESSAGE_HEAD_BYTES + int.from_bytes(self._message[1:_MESSAGE_HEAD_BYTES], "big")
            self._skipped, self._message = size - len(self._message), b""
        return False


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
