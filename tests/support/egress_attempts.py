"""Attempts to get past the egress proxy: what a sandbox sends, and the reason with which it is refused.

The table knows no proxy and no sandbox, so that the engine alone and a whole daemon can be tried with it. A test serves
a session under `RULES`, has its resolver answer with `NAMES`, in which `SERVER` stands for the address of its own server,
sends `sent` over a connection of its own, and expects one denial with `reason`, and that no byte reaches its server.
Names and addresses are here in a few spellings only; tests/unit/guest/egress has all of them.
"""

# ruff: noqa: RUF001 - the look-alikes are what is tried
from __future__ import annotations

import ssl
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from executor_server.guest.egress import reasons
from tests.support.egress_engine import client_hello

SERVER = "SERVER"
RAW_PORT = 9000
TLS_PORT = 9443

RULES: dict[str, Any] = {
    "allowed": [
        "allowed.example",
        "*.wild.example:443",
        f"raw.example:{RAW_PORT}",
        f"raw.example:{TLS_PORT}",
        "*.lies.example",
        "169.254.169.254:80",
        "127.0.0.1:443",
        "[::1]:443",
        "[64:ff9b::a9fe:a9fe]:80",
    ],
    "denied": ["secret.wild.example", "denied.example"],
    "max_new_connections_per_minute": 100_000,
}

_LIES = {
    "metadata": ("169.254.169.254",),
    "metadata-nat64": ("64:ff9b::a9fe:a9fe",),
    "metadata-azure": ("168.63.129.16",),
    "loopback": ("127.0.0.1",),
    "loopback-v6": ("::1",),
    "loopback-mapped": ("::ffff:127.0.0.1",),
    "private-10": ("10.0.0.1",),
    "scoped": ("fe80::1%lo",),
    "several": ("10.0.0.1", "127.0.0.1", "::1", "169.254.169.254"),
    "spelled": ("0x7f000001",),
    "no-address": ("localhost",),
}
NAMES: dict[str, tuple[str, ...]] = {
    "allowed.example": (SERVER,),
    "a.wild.example": (SERVER,),
    "raw.example": (SERVER,),
    # Names that no rule covers have an address too: only the rules stand between them and the server.
    "evil.example": (SERVER,),
    "denied.example": (SERVER,),
    "secret.wild.example": (SERVER,),
    **{f"{name}.lies.example": addresses for name, addresses in _LIES.items()},
}


@dataclass(frozen=True)
class Attempt:
    name: str
    sent: bytes
    reason: str
    tunnelled: bool = False  # it is refused inside a tunnel that was allowed, so a connection to the server is made
    unfinished: bool = False  # it is refused after the time for a head, which a test may want to shorten


@dataclass(frozen=True)
class Rewritten:
    """A request with two readings that is passed on in the one which was checked."""

    name: str
    sent: bytes
    must_have: tuple[bytes, ...]
    must_lack: tuple[bytes, ...]


def attempts() -> Iterator[Attempt]:
    """All of them. Names are unique, and say what is tried."""
    yield from _unlisted()
    yield from _no_names()
    yield from _addresses()
    yield from _framing()
    yield from _tunnelled()
    yield from _lies()
    yield from _unfinished()


# -- building blocks


def connect(authority: str | bytes, *, host: str | bytes | None = None, more: bytes = b"") -> bytes:
    host = authority if host is None else host
    return b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n" % (_bytes(authority), _bytes(host), more)


def get(url: str | bytes, *, host: str | bytes | None = "allowed.example", more: bytes = b"") -> bytes:
    line = b"" if host is None else b"Host: %s\r\n" % _bytes(host)
    return b"GET %s HTTP/1.1\r\n%s%s\r\n" % (_bytes(url), line, more)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


# -- hosts and ports that no rule covers


def _unlisted() -> Iterator[Attempt]:
    for authority in (
        "evil.example:443",
        "allowed.example.evil.example:443",
        "evilallowed.example:443",
        "allowed.example-evil.example:443",
        "sub.allowed.example:443",
        "example:443",
        "wild.example:443",
        "evilwild.example:443",
        "a.wild.example.evil.example:443",
        "a.wild.example:80",
        "allowed.example:22",
        "allowed.example:8443",
        "allowed.example:65535",
        "raw.example:443",
        "localhost:443",
        "host.docker.internal:443",
        "metadata.google.internal:80",
        "127.0.0.1.nip.io:443",
        "169-254-169-254.nip.io:80",
        "xn--llowed-2nf.example:443",  # its first letter is Cyrillic
    ):
        yield Attempt(f"CONNECT to {authority}", connect(authority), reasons.NOT_ALLOWED)
    yield Attempt(
        "Host names an allowed host", connect("evil.example:443", host="allowed.example:443"), reasons.NOT_ALLOWED
    )
    for authority in (
        "secret.wild.example:443",
        "SECRET.Wild.Example.:443",
        "a.secret.wild.example:443",
        "denied.example:25",
    ):
        yield Attempt(f"CONNECT to denied {authority}", connect(authority), reasons.DENIED)
    for url in (
        "http://evil.example/",
        "http://evil.example/http://allowed.example/",
        "http://evil.example:80/",
        "HTTP://EVIL.EXAMPLE/",
        "http://allowed.example:8080/",
        "http://a.wild.example/",
    ):
        yield Attempt(f"GET {url}", get(url), reasons.NOT_ALLOWED)
    yield Attempt("GET of a denied host", get("http://denied.example/"), reasons.DENIED)


# -- hosts that are no names


def _no_names() -> Iterator[Attempt]:
    for authority in (
        "allowed.example",
        ":443",
        "allowed.example:0",
        "allowed.example:65979",  # 443 in 16 bits
        "allowed.example:+443",
        "allowed.example:0x1bb",
        "user@allowed.example:443",
        "allowed.example:443@evil.example:443",
        "evil.example#@allowed.example:443",
        "evil.example\\@allowed.example:443",
        "allowed.example:443/",
        "https://allowed.example:443",
        "evil..allowed.example:443",
        "%61llowed.example:443",
        "evil.example%00.allowed.example:443",
        "allowed.example,evil.example:443",
        "*.wild.example:443",
        "[allowed.example]:443",
        "xn--a.wild.example:443",  # a control character
        f"{'a' * 64}.wild.example:443",
        f"{'a' * 10_000}.wild.example:443",
    ):
        shown = authority if len(authority) < 60 else f"{authority[:20]}… of {len(authority)} characters"
        yield Attempt(f"CONNECT to {shown}", connect(authority, host="allowed.example"), reasons.BAD_NAME)
    for url in (
        "http://user@allowed.example/",
        "http://allowed.example@evil.example/",
        "http://evil.example\\@allowed.example/",
        "http://evil.example?@allowed.example/",
        "http://allowed.example:/",
        "http:///allowed.example/",
        "http:///",
        "http://%61llowed.example/",
    ):
        yield Attempt(f"GET {url}", get(url), reasons.BAD_NAME)


# -- addresses in every spelling


def _addresses() -> Iterator[Attempt]:
    for host in (
        "1.2.3.4",
        "127.1",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.0.0.1.",
        "allowed.example.1",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::169.254.169.254]",
        "[fe80::1%25lo]",
        "[2606:4700::1111]",
    ):
        yield Attempt(f"CONNECT to {host}", connect(f"{host}:443"), reasons.ADDRESS_LITERAL)
    yield Attempt("CONNECT to ::1 without brackets", connect("::1:443"), reasons.ADDRESS_LITERAL)
    for host in ("0x7f.1", "[::ffff:127.0.0.1]"):
        yield Attempt(f"GET of {host}", get(f"http://{host}/"), reasons.ADDRESS_LITERAL)
    # A policy that lists an address that no policy may open.
    for authority in ("169.254.169.254:80", "127.0.0.1:443", "[::1]:443", "[64:ff9b::a9fe:a9fe]:80"):
        yield Attempt(f"CONNECT to the listed {authority}", connect(authority), reasons.REFUSED_ADDRESS)
    yield Attempt("GET of a listed address", get("http://169.254.169.254/latest/meta-data/"), reasons.REFUSED_ADDRESS)


# -- requests that two programs read in two ways, and what is no request


def _framing() -> Iterator[Attempt]:
    url = "http://allowed.example/"
    for name, sent in {
        "CR and LF in a target": connect("allowed.example:443\r\nHost:evil.example", host="allowed.example"),
        "CR in a target": connect("allowed.example\r.evil.example:443"),
        "NUL in a target": connect("allowed.example\0.evil.example:443"),
        "space in a target": connect("allowed.example evil.example:443"),
        "tab in a target": connect("allowed.example\tevil.example:443"),
        "Unicode in a target": connect("ａllowed.example:443"),
        "full-width dots in a target": connect("127。0。0。1:443"),
        "Latin-1 in a target": connect(b"\xe4llowed.example:443"),
        "space before the target": b"CONNECT  allowed.example:443 HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        "two Hosts": get(url, more=b"Host: evil.example\r\n"),
        "two equal Hosts": get(url, more=b"Host: allowed.example\r\n"),
        "no Host": get(url, host=None),
        "NUL in a Host": get(url, host="allowed.example\0evil.example"),
        "line break in a header": get(url, more=b"X: a\rHost: evil.example\r\n"),
        "NUL in a header": get(url, more=b"X: a\0b\r\n"),
        "space before a header's colon": get(url, more=b"Host : evil.example\r\n"),
        "header without a name": get(url, more=b": x\r\n"),
        "header without a colon": get(url, more=b"evil\r\n"),
        "header whose name has a control character": get(url, more=b"X\x01: x\r\n"),
        "folded first header": b"GET %s HTTP/1.1\r\n Host: allowed.example\r\n\r\n" % url.encode(),
        "Transfer-Encoding with Content-Length": get(url, more=b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"),
        "Content-Length with Transfer-Encoding": get(url, more=b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n"),
        "Transfer-Encoding in HTTP/1.0": b"POST %s HTTP/1.0\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\n\r\n"
        % url.encode(),
        "two codings": get(url, more=b"Transfer-Encoding: gzip, chunked\r\n"),
        "an unknown coding": get(url, more=b"Transfer-Encoding: xchunked\r\n"),
        "chunked twice": get(url, more=b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
        "coding spelled with a control character": get(url, more=b"Transfer-Encoding: \x0bchunked\r\n"),
        "identity coding": get(url, more=b"Transfer-Encoding: identity\r\n"),
        "two lengths": get(url, more=b"Content-Length: 4\r\nContent-Length: 5\r\n"),
        "two lengths in one header": get(url, more=b"Content-Length: 4, 5\r\n"),
        "negative length": get(url, more=b"Content-Length: -1\r\n"),
        "signed length": get(url, more=b"Content-Length: +4\r\n"),
        "hexadecimal length": get(url, more=b"Content-Length: 0x4\r\n"),
        "length of many digits": get(url, more=b"Content-Length: %s\r\n" % (b"9" * 100)),
        "CONNECT with a length": connect("allowed.example:443", more=b"Content-Length: 4\r\n") + b"GET ",
        "CONNECT with a coding": connect("allowed.example:443", more=b"Transfer-Encoding: chunked\r\n") + b"0\r\n\r\n",
        "absolute https": get("https://allowed.example/"),
        "absolute https in capitals": get("HTTPS://allowed.example/"),
        "ftp": get("ftp://allowed.example/"),
        "file": get("file:///etc/passwd"),
        "gopher": get("gopher://allowed.example/"),
        "scheme without slashes": get("http:allowed.example/"),
        "authority without a scheme": get("//allowed.example/"),
        "fragment": get("http://allowed.example/#@evil.example/"),
        "fragment in the authority": get("http://evil.example#@allowed.example/"),
        "origin form": get("/"),
        "asterisk form": b"OPTIONS * HTTP/1.1\r\nHost: allowed.example\r\n\r\n",
        "authority form for GET": get("allowed.example:80"),
        "HTTP/0.9": b"GET http://allowed.example/\r\n\r\n",
        "HTTP/1.2": b"GET %s HTTP/1.2\r\nHost: allowed.example\r\n\r\n" % url.encode(),
        "HTTP/2.0": b"GET %s HTTP/2.0\r\nHost: allowed.example\r\n\r\n" % url.encode(),
        "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "lower-case version": b"GET %s http/1.1\r\nHost: allowed.example\r\n\r\n" % url.encode(),
        "SOCKS 5": b"\x05\x01\x00\x05\x01\x00\x03\x0fallowed.example\x01\xbb\r\n\r\n",
        "SOCKS 4": b"\x04\x01\x01\xbb\x7f\x00\x00\x01\x00\r\n\r\n",
        "TLS to the proxy": client_hello("allowed.example") + b"\r\n\r\n",
        "PROXY protocol": b"PROXY TCP4 127.0.0.1 127.0.0.1 1 443\r\n" + connect("allowed.example:443"),
        "garbage": b"\xff\xfe\xfd\r\n\r\n",
    }.items():
        yield Attempt(name, sent, reasons.BAD_REQUEST)
    for name, sent in {
        "head of 16 KiB and a byte": get(url, more=b"X: %s\r\n" % (b"x" * 16_384)),
        "head of a megabyte": get(url, more=b"X: %s\r\n" % (b"x" * 2**20)),
        "head of 100,000 headers": get(url, more=b"X: x\r\n" * 100_000),
        "target of a megabyte": get("http://allowed.example/" + "x" * 2**20),
        "host of a megabyte": connect(f"{'a' * 2**20}.wild.example:443"),
        "line without an end": b"x" * 2**20,
    }.items():
        yield Attempt(name, sent, reasons.HEAD_TOO_LARGE)


# -- inside of a tunnel that was allowed


def _tunnelled() -> Iterator[Attempt]:
    old = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    hello = client_hello("allowed.example")
    huge = b"\x16\x03\x01\x40\x00\x01\x00\xff\xff\x03\x03" + bytes(0x4000 - 6)
    for name, first, reason in (
        ("server name of another host", client_hello("evil.example"), reasons.SERVER_NAME),
        ("server name below the host", client_hello("sub.allowed.example"), reasons.SERVER_NAME),
        ("server name above the host", client_hello("example"), reasons.SERVER_NAME),
        ("server name of a denied host", client_hello("denied.example"), reasons.SERVER_NAME),
        ("server name that is an address", _named_hello(b"127.0.0.1"), reasons.SERVER_NAME),
        ("server name with a NUL", _named_hello(b"allowed.example\0.evil.example"), reasons.SERVER_NAME),
        ("server name that is not ASCII", _named_hello("ａllowed.example".encode()), reasons.SERVER_NAME),
        ("server name that is empty", _named_hello(b""), reasons.SERVER_NAME),
        ("two server names", _named_hello(b"allowed.example", b"evil.example"), reasons.SERVER_NAME),
        ("no server name", client_hello(None), reasons.SERVER_NAME),
        ("TLS 1.1", client_hello("allowed.example", versions=old), reasons.OLD_TLS),
        ("HTTP where TLS is expected", get("/"), reasons.SERVER_NAME),
        ("SSH where TLS is expected", b"SSH-2.0-OpenSSH_9.2\r\n", reasons.SERVER_NAME),
        ("ClientHello of SSL 2", b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + bytes(37), reasons.SERVER_NAME),
        ("an alert before the ClientHello", b"\x15\x03\x01\x00\x02\x01\x00" + hello, reasons.SERVER_NAME),
        ("a ServerHello", b"\x16\x03\x03\x00\x04\x02\x00\x00\x00", reasons.SERVER_NAME),
        ("a ClientHello of garbage", b"\x16\x03\x01\x00\x08\x01\x00\x00\x04\x03\x03\x00\x00", reasons.SERVER_NAME),
        ("a ClientHello larger than is read", huge + huge, reasons.SERVER_NAME),
    ):
        yield Attempt(f"tunnel to 443: {name}", connect("allowed.example:443") + first, reason, tunnelled=True)
    for name, first in (
        ("server name of another host", client_hello("evil.example")),
        ("no server name", client_hello(None)),
    ):
        sent = connect(f"raw.example:{TLS_PORT}") + first
        yield Attempt(f"tunnel to a listed port: {name}", sent, reasons.SERVER_NAME, tunnelled=True)
    chunked = b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n"
    for name, first, reason in (
        ("Host of another host", get("/", host="evil.example"), reasons.MISDIRECTED),
        ("Host with another port", get("/", host="allowed.example:8080"), reasons.MISDIRECTED),
        ("Host with user information", get("/", host="allowed.example@evil.example"), reasons.MISDIRECTED),
        ("Host that is an address", get("/", host="169.254.169.254"), reasons.MISDIRECTED),
        ("Host that is empty", get("/", host=""), reasons.MISDIRECTED),
        ("no Host", b"GET / HTTP/1.0\r\n\r\n", reasons.MISDIRECTED),
        ("two Hosts", get("/", more=b"Host: evil.example\r\n"), reasons.BAD_REQUEST),
        ("absolute URL of another host", get("http://evil.example/"), reasons.MISDIRECTED),
        ("a CONNECT in the tunnel", connect("evil.example:443", host="allowed.example"), reasons.MISDIRECTED),
        ("Transfer-Encoding with Content-Length", get("/", more=chunked), reasons.BAD_REQUEST),
        ("TLS", client_hello("evil.example") + b"\r\n\r\n", reasons.BAD_REQUEST),
        ("SSH", b"SSH-2.0-OpenSSH_9.2\r\n\r\n", reasons.BAD_REQUEST),
        ("a head larger than is read", get("/", more=b"X: %s\r\n" % (b"x" * 2**17)), reasons.HEAD_TOO_LARGE),
    ):
        yield Attempt(f"tunnel to 80: {name}", connect("allowed.example:80") + first, reason, tunnelled=True)


def _named_hello(*names: bytes) -> bytes:
    """A ClientHello of TLS 1.2 whose server names no TLS library would write."""
    listed = b"".join(b"\x00" + struct.pack(">H", len(name)) + name for name in names)
    body = struct.pack(">H", len(listed)) + listed
    extensions = b"\x00\x00" + struct.pack(">H", len(body)) + body
    hello = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\xc0\x2f" + b"\x01\x00"
    hello += struct.pack(">H", len(extensions)) + extensions
    message = b"\x01" + struct.pack(">I", len(hello))[1:] + hello
    return b"\x16\x03\x01" + struct.pack(">H", len(message)) + message


# -- names that resolve to what no name may lead to


def _lies() -> Iterator[Attempt]:
    for name in _LIES:
        host = f"{name}.lies.example"
        sent = connect(f"{host}:443")
        yield Attempt(f"CONNECT to a name of {name}", sent, reasons.REFUSED_ADDRESS)
    for name in ("metadata", "loopback", "loopback-mapped"):
        url = f"http://{name}.lies.example/"
        yield Attempt(f"GET of a name of {name}", get(url, host=f"{name}.lies.example"), reasons.REFUSED_ADDRESS)
    yield Attempt("a name that does not exist", connect("none.lies.example:443"), reasons.UNRESOLVED)


# -- heads that do not end


def _unfinished() -> Iterator[Attempt]:
    for name, sent in {
        "a head without its end": b"GET http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\n",
        "half a line": b"CONNECT allowed.exam",
        "one byte": b"G",
    }.items():
        yield Attempt(name, sent, reasons.HEAD_TIMEOUT, unfinished=True)
    hello = connect("allowed.example:443") + client_hello("allowed.example")[:40]
    yield Attempt("half a ClientHello", hello, reasons.HEAD_TIMEOUT, tunnelled=True, unfinished=True)


# -- requests that pass, in the reading that was checked


def rewritten() -> Iterator[Rewritten]:
    ours = (b"\r\nHost: allowed.example\r\n",)
    for name, sent, must_have, must_lack in (
        ("Host of another host", get("http://allowed.example/", host="evil.example"), ours, (b"evil",)),
        (
            "host in capitals",
            get("http://ALLOWED.Example.:80/", host="evil.example"),
            ours,
            (b"evil", b"ALLOWED", b":80"),
        ),
        ("URL in the path", get("http://allowed.example/http://evil.example/"), (b"GET /http://evil", *ours), ()),
        (
            "headers of one connection",
            get(
                "http://allowed.example/",
                more=b"Connection: X-Evil, host\r\nX-Evil: 1\r\nProxy-Authorization: evil\r\n",
            ),
            ours,
            (b"vil",),
        ),
        (
            "an upgrade",
            get("http://allowed.example/", more=b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\n"),
            ours,
            (b"Upgrade", b"h2c"),
        ),
        (
            "a folded header",
            get("http://allowed.example/", more=b"X: a\r\n Host: evil.example\r\n"),
            (b"\r\nX: a Host: evil.example\r\n", *ours),
            (b"\r\nHost: evil", b"\r\n Host"),
        ),
        (
            "a second request behind the first",
            get("http://allowed.example/") + get("http://evil.example/"),
            ours,
            (b"evil",),
        ),
        (
            "a request hidden in a body",
            b"POST http://allowed.example/ HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 4\r\n\r\nbody"
            + get("/evil"),
            (b"\r\n\r\nbody", *ours),
            (b"evil",),
        ),
    ):
        yield Rewritten(name, sent, must_have, must_lack)
