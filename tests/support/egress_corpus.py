"""Attempts to get past the egress proxy, as the bytes that a program in a sandbox sends to it.

SITE is allowed, DENIED is not, and neither is any address. An attempt that is refused gets an error of HTTP, or the
connection is closed; none of its bytes may reach a server.
"""

from __future__ import annotations

from tests.support.internet.world import RAW_PORT, SUFFIX

SITE = f"www.{SUFFIX}"
DENIED = f"denied.{SUFFIX}"
_END = b"\r\n\r\n"


def _connect(target: str | bytes, *, headers: bytes = b"") -> bytes:
    text = target if isinstance(target, bytes) else target.encode()
    return b"CONNECT " + text + b" HTTP/1.1\r\nHost: " + SITE.encode() + b"\r\n" + headers + b"\r\n"


def _get(target: str, *, host: str = SITE, headers: str = "", body: bytes = b"") -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{headers}\r\n".encode() + body


# An address in each spelling that some resolver or library takes for one; {own} is the one of the servers, which would
# be reached by its name.
_LITERALS = (
    *("{own}", "{trap}", "127.0.0.1", "127.1", "127.0.1", "0", "0.0.0.0", "1.1", "1.2.3.4", "255.255.255.255"),
    *("2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0x7F.1", "127.0.0.01", "127.0.0.1."),
    *("169.254.169.254", "2852039166", "0xa9fea9fe", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:169.254.169.254]"),
    *("[::ffff:a9fe:a9fe]", "[fe80::1%lo]", "[fe80::1%25lo]", "[fd00:ec2::254]", "[64:ff9b::7f00:1]", "[::127.0.0.1]"),
    *("[0:0:0:0:0:ffff:7f00:1]", "::1", "[1.2.3.4]", "[v1.fe80::1]"),
    *("①②⑦.⓪.⓪.①", "127。0。0。1", "１２７.0.0.1"),  # noqa: RUF001 - digits and dots of other scripts are the point
)
_NAMES = (
    *(DENIED, DENIED.upper(), f"{DENIED}.", f"below.{DENIED}", SUFFIX, f"{SITE}.elsewhere.example", f"evil{SUFFIX}"),
    *("localhost", "metadata.google.internal", "host.docker.internal", "elsewhere.example", "example", "com"),
    *("", ".", f".{SITE}", f"www..{SUFFIX}", f"{SITE}..", f"*.{SUFFIX}", f"-www.{SUFFIX}", f"www-.{SUFFIX}"),
    *(f"user@{SITE}", f"{DENIED}#@{SITE}", f"{DENIED}#.{SUFFIX}", f"{DENIED}\\.{SUFFIX}", f"{DENIED}?.{SUFFIX}"),
    *(f"%77ww.{SUFFIX}", f"{SITE}%00", f"{SITE}%2e{DENIED}", f"http://{SITE}", f"//{SITE}", f"{SITE}/", f"/{SITE}"),
    *(f"{'a' * 64}.{SUFFIX}", f"{'a.' * 130}{SUFFIX}", f"xn--.{SUFFIX}", f"xn--a-.{SUFFIX}", f"ｗｗｗ.{SUFFIX}"),  # noqa: RUF001
    *(f"w­ww.{SUFFIX}", f"ẅww.{SUFFIX}", f"{SITE},{DENIED}", f"{SITE};{DENIED}", f"[{SITE}]"),
)
_PORTS = (
    "",
    ":",
    ":0",
    ":65536",
    ":99999999999",
    ":-443",
    ":+443",
    ":0x1bb",
    ":443:80",
    ":443/",
    ":４４３",  # noqa: RUF001
    ":22",
    ":25",
)

ATTEMPTS: dict[str, bytes] = {
    **{f"literal {text}": _connect(f"{text}:443") for text in _LITERALS},
    **{f"literal in a request {text}": _get(f"http://{text}/") for text in _LITERALS if text.isascii()},
    **{f"name {text[:80]}": _connect(f"{text}:443") for text in _NAMES},
    **{f"port {text}": _connect(f"{SITE}{text}") for text in _PORTS},
    # Bytes that end the name for one reader and not for another.
    "NUL in the name": _connect(f"{SITE}\0.elsewhere.example:443"),
    "tab in the name": _connect(f"{SITE}\t{DENIED}:443"),
    "space in the name": _connect(f"{SITE}:443 {DENIED}:443"),
    "CR in the name": _connect(f"{SITE}\r{DENIED}:443"),
    "line break in the name": _connect(f"{DENIED}:443 HTTP/1.1\r\nX: y\r\nX: {SITE}:443"),
    "Latin-1 in the name": _connect(b"w\xffw." + SUFFIX.encode() + b":443"),
    # Requests of other forms.
    "request without a host": b"GET / HTTP/1.1" + _END,
    "request for the proxy itself": _get("/"),
    "request for the proxy itself, for another host": _get("/", host=DENIED),
    "TLS by the proxy": _get(f"https://{SITE}/"),
    "another scheme": _get(f"ftp://{SITE}/"),
    "a file": _get("file:///etc/passwd"),
    "no scheme": _get(f"//{SITE}/"),
    "a user in a URL": _get(f"http://{DENIED}@{SITE}:80@{DENIED}/"),
    "a fragment in a URL": _get(f"http://{DENIED}#@{SITE}/"),
    "a backslash in a URL": _get(f"http://{DENIED}\\@{SITE}/"),
    "plain HTTP to the port of TLS": _get(f"http://{SITE}:443/"),
    "another port in a URL": _get(f"http://{SITE}:22/"),
    "everything": b"OPTIONS * HTTP/1.1\r\nHost: " + SITE.encode() + _END,
    "the denied host in a URL, the allowed one in Host": _get(f"http://{DENIED}/", host=SITE),
    # Heads that are read in two ways.
    "length and chunks": _get(
        f"http://{SITE}/", headers="Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", body=b"0\r\n\r\n"
    ),
    "two lengths": _get(f"http://{SITE}/", headers="Content-Length: 5\r\nContent-Length: 6\r\n", body=b"hello!"),
    "a negative length": _get(f"http://{SITE}/", headers="Content-Length: -1\r\n"),
    "a length that is none": _get(f"http://{SITE}/", headers="Content-Length: 0x5\r\n", body=b"hello"),
    "chunks twice": _get(f"http://{SITE}/", headers="Transfer-Encoding: chunked, chunked\r\n", body=b"0\r\n\r\n"),
    "chunks by another name": _get(f"http://{SITE}/", headers="Transfer-Encoding: xchunked\r\n", body=b"0\r\n\r\n"),
    "two hosts": _get(f"http://{SITE}/", headers=f"Host: {DENIED}\r\n"),
    "a space before the colon": _get(f"http://{SITE}/", headers="Content-Length : 5\r\n", body=b"hello"),
    "a header with NUL": _get(f"http://{SITE}/", headers="X: a\0b\r\n"),
    "a bare CR in a header": _get(f"http://{SITE}/", headers=f"X: a\rHost: {DENIED}\r\n"),
    "a body for CONNECT": _connect(f"{DENIED}:443", headers=b"Content-Length: 5\r\n") + b"hello",
    "an upgrade": _get(f"http://{DENIED}/", headers="Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    # Other protocols.
    "HTTP/0.9": f"GET http://{SITE}/\r\n".encode() + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/3.7": f"CONNECT {SITE}:443 HTTP/3.7\r\n\r\n".encode(),
    "a method in lower case": f"connect {SITE}:443 HTTP/1.1\r\n\r\n".encode(),
    "SOCKS 5": b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(SITE)]) + SITE.encode() + b"\x01\xbb\r\n\r\n",
    "SOCKS 4a": b"\x04\x01\x01\xbb\x00\x00\x00\x01user\x00" + SITE.encode() + b"\x00\r\n\r\n",
    "TLS": b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00\r\n\r\n",
    "a head of a megabyte": b"CONNECT " + SITE.encode() + b":443 HTTP/1.1\r\n" + b"X: " + b"y" * 2**20 + _END,
    "ten thousand headers": b"CONNECT " + SITE.encode() + b":443 HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    "a target of 60,000 characters": _connect("a" * 60_000 + f".{SUFFIX}:443"),
}
"""Names of attempts, and their bytes. `{own}` and `{trap}` stand for addresses of the world."""

_HELLO = b"\x16\x03\x01"
TUNNELLED: dict[str, tuple[str, bytes]] = {
    "HTTP where TLS is expected": (f"{SITE}:443", _get("/")),
    "words where TLS is expected": (f"{SITE}:443", b"EHLO there\r\n"),
    "a ClientHello of another version": (f"{SITE}:443", b"\x80\x2e\x01\x00\x02\x00\x15\x00\x00\x00\x10" + bytes(36)),
    "a ClientHello that is cut": (f"{SITE}:443", _HELLO + b"\x00\x04\x01\x00\x00\x00"),
    "a ClientHello of rubbish": (f"{SITE}:443", _HELLO + b"\x00\x28\x01\x00\x00\x24" + bytes(range(36))),
    "an alert": (f"{SITE}:443", b"\x15\x03\x01\x00\x02\x02\x28"),
    "application data": (f"{SITE}:443", b"\x17\x03\x03\x00\x05hello"),
    "another Host in a tunnel to port 80": (f"{SITE}:80", _get("/", host=DENIED)),
    "a URL of another host in a tunnel to port 80": (f"{SITE}:80", _get(f"http://{DENIED}/")),
    "two hosts in a tunnel to port 80": (f"{SITE}:80", _get("/", headers=f"Host: {DENIED}\r\n")),
    "no host in a tunnel to port 80": (f"{SITE}:80", b"GET / HTTP/1.0\r\n\r\n"),
    "another protocol in a tunnel to port 80": (f"{SITE}:80", b"SSH-2.0-x\r\n"),
    "a tunnel in a tunnel": (f"{SITE}:80", _connect(f"{DENIED}:443")),
    "rubbish TLS on a port without rules for its bytes": (
        f"raw.{SUFFIX}:{RAW_PORT}",
        _HELLO + b"\x00\x04\x01\x00\x00\x00",
    ),
}
"""The target of a tunnel that is allowed, and bytes that the proxy must not pass through it."""
