"""The head of a sandbox's request: read by h11, and understood in one way or refused.

If a proxy reads a request differently from the server behind it, it can be made to check one name and serve another. So
it passes on nothing ambiguous: neither the target nor the length of the body.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional, Tuple

import h11

from . import reasons
from .host_names import BadName, LiteralAddress, Target, parse_authority
from .refusals import Refusal, shown

HTTP_PORT = 80
_SCHEME = b"http://"
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_TOO_LARGE = "the head of the request is larger than the proxy reads"


class Head(NamedTuple):
    """A request that the sandbox sent, and the machine that reads on where its head ended."""

    target: Target
    request: h11.Request
    path: bytes  # origin form, for the server; empty for CONNECT
    machine: h11.Connection

    @property
    def is_connect(self) -> bool:
        return self.request.method == b"CONNECT"

    def take_rest(self) -> bytes:
        """Returns the bytes behind the head of a CONNECT: the first ones of the tunnel."""
        return bytes(self.machine.trailing_data[0])


class LineLimit:
    """Counts the lines of a head before h11 reads it.

    h11 bounds its bytes. But it reads a head in one go, at 5 µs for each header: 4,000 headers of four bytes would stop
    all sessions for as long as 50 connections take.
    """

    def __init__(self, lines: int) -> None:
        self._left = lines
        self._tail = b""
        self._complete = False

    def allows(self, data: bytes) -> bool:
        if self._complete:
            return True
        window = self._tail + data
        end = _END_OF_HEAD.search(window)
        self._left -= window.count(b"\n", len(self._tail), end.end() if end else len(window))
        self._complete = end is not None
        self._tail = window[-2:]
        return self._left >= 0


class HeadReader:
    """Takes the bytes of a connection until they are a head. Does no I/O."""

    def __init__(self, head_bytes: int, head_lines: int) -> None:
        self._lines = LineLimit(head_lines)
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)
        self._left = head_bytes
        self.is_empty = True  # nothing was fed
        self.method = b""  # known of a refused request too: a HEAD is answered without a body

    @property
    def wanted(self) -> int:
        """Bytes to read next. One more than the limit allows, so that a head of exactly the limit is accepted."""
        return self._left + 1

    def feed(self, data: bytes) -> Optional[Head]:
        """Returns the head once it is complete. Empty `data` means that the client ended. Raises Refusal."""
        request = self._feed(data)
        if request is None:
            if self._left < 0:
                raise Refusal(reasons.HEAD_TOO_LARGE, _TOO_LARGE)
            return None
        self.method = bytes(request.method)
        check_framing(request)
        return self._understood(request)

    def _understood(self, request: h11.Request) -> Head:
        if request.method == b"CONNECT":
            return self._connect(request)
        target, path = absolute_target(bytes(request.target))
        return Head(target, request, path, self._machine)

    def _feed(self, data: bytes) -> Optional[h11.Request]:
        self._left -= len(data)
        self.is_empty = False
        if not self._lines.allows(data):
            raise Refusal(reasons.HEAD_TOO_LARGE, _TOO_LARGE)
        self._machine.receive_data(data)
        try:
            event = self._machine.next_event()
        except h11.RemoteProtocolError as error:
            raise _not_http(error) from error
        if event is h11.NEED_DATA:
            return None
        if isinstance(event, h11.Request):
            return event
        raise Refusal(reasons.BAD_REQUEST, "the connection ended before a request")

    def _connect(self, request: h11.Request) -> Head:
        if any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in request.headers
        ):
            raise Refusal(reasons.BAD_REQUEST, "a CONNECT has no body")
        if self._machine.next_event().__class__ is not h11.EndOfMessage:
            raise Refusal(reasons.BAD_REQUEST, "a CONNECT has no body")
        return Head(_target_of(request.target.decode("ascii")), request, b"", self._machine)


class TunnelHeadReader(HeadReader):
    """Reads the head of a request inside a tunnel, in the form for a server. It must be for the tunnel's host."""

    def __init__(self, target: Target, head_bytes: int, head_lines: int) -> None:
        super().__init__(head_bytes, head_lines)
        self._target = target

    def _understood(self, request: h11.Request) -> Head:
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        if hosts != [host for host in hosts if self._is_ours(host)] or not hosts:
            raise self._misdirected(hosts[0] if hosts else "no host")
        path = bytes(request.target)
        if request.method == b"CONNECT":  # it would ask the server for a tunnel
            raise self._misdirected(path.decode("ascii"))
        if not path.startswith(b"/") and path != b"*":
            # A server prefers the host of an absolute target to the Host header.
            target, path = absolute_target(path)
            if target != self._target:
                raise self._misdirected(str(target))
        return Head(self._target, request, path, self._machine)

    def _is_ours(self, host: str) -> bool:
        try:
            return parse_authority(host, default_port=HTTP_PORT) == self._target
        except LiteralAddress as error:
            return error.target == self._target
        except BadName:
            return False

    def _misdirected(self, other: str) -> Refusal:
        message = f"the tunnel was asked for {self._target}, and the request in it is for {shown(other)}"
        return Refusal(reasons.MISDIRECTED, message)


def _not_http(error: h11.RemoteProtocolError) -> Refusal:
    if error.error_status_hint == 431:
        return Refusal(reasons.HEAD_TOO_LARGE, _TOO_LARGE)
    return Refusal(reasons.BAD_REQUEST, f"the proxy can't read this as an HTTP request: {shown(str(error))}")


def check_framing(request: h11.Request) -> None:
    """Refuses requests whose body has two lengths, and versions that h11 reads but nobody sends."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise Refusal(reasons.BAD_REQUEST, "the proxy speaks HTTP/1.1 and HTTP/1.0 only")
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
        # RFC 9112, section 6.1: with both, or in HTTP/1.0, some servers heed one and some the other, which lets a
        # second request hide in the body of the first.
        raise Refusal(reasons.BAD_REQUEST, "the length of the request's body can be read in two ways")


def absolute_target(target: bytes) -> Tuple[Target, bytes]:
    """The target and path of an absolute-form `http://` URL. Raises Refusal.

    The authority ends at the first slash. `?`, `#` and a backslash do not end it, because URL parsers disagree on them:
    they stay in the authority, which then is not a valid name.
    """
    scheme, rest = target[: len(_SCHEME)].lower(), target[len(_SCHEME) :]
    if scheme != _SCHEME:
        if target.lower().startswith(b"https://"):
            raise Refusal(reasons.BAD_REQUEST, "an https:// URL must be asked for with CONNECT")
        raise Refusal(reasons.BAD_REQUEST, "this is a proxy: ask it for http:// URLs, or with CONNECT")
    if b"#" in target:
        raise Refusal(reasons.BAD_REQUEST, "the URL of a request has no fragment")
    authority, _, path = rest.partition(b"/")
    return _target_of(authority.decode("ascii"), default_port=HTTP_PORT), b"/" + path


def _target_of(authority: str, default_port: Optional[int] = None) -> Target:
    try:
        return parse_authority(authority, default_port=default_port)
    except LiteralAddress as error:
        if error.target is not None:
            return error.target  # rules may list it
        raise Refusal(reasons.ADDRESS_LITERAL, f"{shown(authority)} {error}", host=shown(authority)) from error
    except BadName as error:
        raise Refusal(reasons.BAD_NAME, f"{shown(authority)} {error}", host=shown(authority)) from error
