"""No packet leaves a sandbox but through the proxy, counted from inside and from outside."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from executor_client import ExecutorClient, Session
from tests.support.internet.world import HTTPS_PORT, RAW_TLS_PORT, SUFFIX, Internet
from tests.support.network import EVERY_SITE, FETCH, namespace_of, networked_daemon, networked_session, policy


@pytest.fixture(scope="module", params=["local", "docker"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Everything that a program might try beside the proxy. Each entry of the result is the error, or "came through".
ATTEMPTS = """
import errno, socket
def attempt(work):
    try:
        work()
        return "came through"
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)

def tcp(address, port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(5)
        s.connect((address, port))

def udp(address, port, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", (address, port))

def raw(protocol):
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol) as s:
        s.sendto(b"x" * 8, (world, 0))

def packet():
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as s:
        s.bind(("lo", 0))

def vsock():
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as s:
        s.connect((2, 1024))

def resolve():
    socket.getaddrinfo("files.test-internet.example", 443)

def broadcast():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        s.sendto(b"x", ("255.255.255.255", 68))

outcome = {
    "tcp 443": attempt(lambda: tcp(world, 443)),
    "tcp 80": attempt(lambda: tcp(world, 80)),
    "tcp 9000": attempt(lambda: tcp(world, 9000)),
    "tcp metadata": attempt(lambda: tcp("169.254.169.254", 80)),
    "tcp elsewhere": attempt(lambda: tcp("192.0.2.1", 443)),
    "tcp 6": attempt(lambda: tcp("2001:db8::1", 443, socket.AF_INET6)),
    "tcp trap": attempt(lambda: tcp(trap, 80)),
    "udp 53": attempt(lambda: udp(world, 53)),
    "udp 443": attempt(lambda: udp(world, 443)),
    "udp multicast": attempt(lambda: udp("224.0.0.251", 5353)),
    "udp 6": attempt(lambda: udp("ff02::1", 5353, socket.AF_INET6)),
    "broadcast": attempt(broadcast),
    "icmp": attempt(lambda: raw(socket.IPPROTO_ICMP)),
    "packet": attempt(packet),
    "vsock": attempt(vsock),
    "names": attempt(resolve),
}
outcome
"""
INTERFACES = "sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').read().splitlines()[2:])"


@pytest.fixture(scope="module")
def plain(internet: Internet, backend: str) -> Iterator[ExecutorClient]:
    with networked_daemon(internet, backend, policy()) as daemon, daemon.client() as client:
        yield client


@pytest.fixture(scope="module")
def session(plain: ExecutorClient) -> Iterator[Session]:
    with networked_session(plain, *EVERY_SITE) as made:
        yield made


def test_everything_beside_the_proxy_fails_at_once_and_reaches_nothing(session: Session, internet: Internet) -> None:
    before = (len(internet.handshakes), len(internet.names.questions), len(internet.raw.conversations))
    began_s = time.monotonic()
    session.set_variables({"world": internet.address, "trap": internet.trap.loopback})
    result = session.execute(ATTEMPTS)
    assert result.error is None, result.logs
    assert isinstance(result.output, dict)
    assert [name for name, ended in result.output.items() if ended == "came through"] == []
    assert time.monotonic() - began_s < 20
    after = (len(internet.handshakes), len(internet.names.questions), len(internet.raw.conversations))
    assert (after, internet.trap.connections) == (before, [])


def test_the_namespace_has_its_loopback_only_and_what_leaves_goes_over_it(session: Session, internet: Internet) -> None:
    namespace = namespace_of(session)
    assert session.execute(INTERFACES).output == ["lo"]
    assert list(namespace.traffic) == ["lo"]
    assert session.execute("open('/proc/net/route').read().splitlines()[1:]").output == []
    size = 1_000_000
    before = namespace.traffic["lo"]
    code = f"{FETCH}\nlen(fetch('http://files.{SUFFIX}/bytes/{size}')[1])"
    result = session.execute(code)
    assert result.output == size
    after = namespace.traffic["lo"]
    # On a loopback each byte is sent and received once; more than the answer and its heads did not pass.
    assert after["sent_bytes"] == after["received_bytes"]
    assert size < after["sent_bytes"] - before["sent_bytes"] < size * 1.1
    assert list(namespace.traffic) == ["lo"]
    moved = result.usage.network
    assert size < moved.received_bytes < size * 1.01 and 0 < moved.sent_bytes < 2000


def test_the_port_can_not_be_taken_over(session: Session) -> None:
    code = """
import errno, os, socket
def bound(address, **options):
    with socket.socket() as s:
        for option in options.values():
            s.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            s.bind((address, 3128))
            s.listen()
        except OSError as error:
            return errno.errorcode[error.errno]
        return "taken"
[os.environ["https_proxy"], bound("127.0.0.1"), bound("127.0.0.1", reuse=socket.SO_REUSEADDR),
 bound("127.0.0.1", reuse=socket.SO_REUSEPORT), bound("0.0.0.0", reuse=socket.SO_REUSEADDR)]
"""
    variable, *attempts = session.execute(code).output
    assert "127.0.0.1:3128" in variable
    assert attempts == ["EADDRINUSE"] * 4


def test_names_that_lead_inwards_are_refused_whoever_lets_them(session: Session, internet: Internet) -> None:
    """Allowed by name, and the name server says otherwise; the second look-up of a name that changes too."""
    name = f"inward.{SUFFIX}"
    inward = [internet.trap.own, internet.trap.loopback, "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"]
    for address in (*inward, "::1", f"::ffff:{internet.trap.own}", "fe80::1", f"64:ff9b::{internet.address}"):
        internet.names.address(name, address, ttl_s=0)
        result = session.execute(f"{FETCH}\nfetch('http://{name}/')")
        status, body = result.output
        assert status == 403 and name in body, (address, body)
        assert internet.trap.connections == []
        internet.names.forget(name)
    changing = f"changing.{SUFFIX}"
    internet.names.changing(changing, [internet.address], [internet.trap.own])
    session.execute(f"{FETCH}\nanswers = [fetch('http://{changing}/')[0] for _ in range(3)]")
    assert internet.trap.connections == []


def test_the_server_name_of_tls_is_the_name_that_was_asked_for(session: Session, internet: Internet) -> None:
    code = f"""
import os, socket, ssl
def handshake(name, server_name, port={HTTPS_PORT}, most=None):
    context = ssl._create_unverified_context()
    if most is not None:
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, most
    with socket.create_connection(("127.0.0.1", 3128), timeout=30) as tunnel:
        tunnel.sendall(f"CONNECT {{name}}:{{port}} HTTP/1.1\\r\\nHost: {{name}}\\r\\n\\r\\n".encode())
        assert b" 200 " in tunnel.recv(4096).split(b"\\r\\n")[0]
        try:
            with context.wrap_socket(tunnel, server_hostname=server_name) as tls:
                return tls.version()
        except OSError as error:
            return "closed"
files, other = "files.{SUFFIX}", "www.{SUFFIX}"
import warnings
warnings.simplefilter("ignore")
[handshake(files, files), handshake(files, other), handshake(files, None), handshake(files, files, most=ssl.TLSVersion.TLSv1_1),
 handshake(files, other, port={RAW_TLS_PORT})]
"""
    before = len(internet.handshakes)
    result = session.execute(code)
    assert result.error is None, f"{result.error}\n{result.logs}"
    good, *bad = result.output
    assert (good, bad) == ("TLSv1.3", ["closed"] * 4)
    # None of the refused ones reached a server.
    assert [each.server_name for each in internet.handshakes[before:]] == [f"files.{SUFFIX}"]
