"""One session's floods of small pieces, and the requests of its neighbour: each session has its share of the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor_server.core import NetworkRules, NetworkSecret
from tests.support.certificates import Authority
from tests.support.egress_service import BoundSession, bind, egress_service, sandbox_context, settings_for
from tests.support.internet.world import Internet
from tests.support.rounds import usual

CONNECTIONS = 30
REQUESTS = 15
# A request takes 2 to 10 ms next to nothing. Next to a flood it takes up to 30 times as long, since the flood's threads
# share the test's interpreter, and took 80 to 200 times as long. A busy machine makes both slower.
TIMES = 50
MEDIAN_S = 0.3
CHUNKS = b"1\r\nx\r\n" * 8000
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
Send = Callable[[socket.socket], None]


@contextlib.contextmanager
def served(address: str, serve: Send, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """A server with a thread for each connection; yields its port."""
    with socket.create_server((address, 0), backlog=256) as listener:

        def handle(sock: socket.socket) -> None:
            with contextlib.suppress(OSError), tls.wrap_socket(sock, server_side=True) if tls else sock as plain:
                serve(plain)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    threading.Thread(target=handle, args=(sock,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def answer(sock: socket.socket) -> None:
    sock.recv(65536)
    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")


def swallow(sock: socket.socket) -> None:
    while sock.recv(65536):
        pass


def send_chunks(sock: socket.socket) -> None:
    while True:
        sock.sendall(CHUNKS)


def send_small_records(sock: socket.socket) -> None:
    while True:
        sock.sendall(b"1\r\nx\r\n")


def answer_in_chunks(sock: socket.socket) -> None:
    sock.recv(65536)
    sock.sendall(HEAD)
    send_chunks(sock)


def upload(session: BoundSession, target: str, _: ssl.SSLContext) -> Send:
    def flood(sock: socket.socket) -> None:
        sock.sendall(f"POST http://{target}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        send_chunks(sock)

    return flood


def download(session: BoundSession, target: str, _: ssl.SSLContext) -> Send:
    def flood(sock: socket.socket) -> None:
        sock.sendall(f"GET http://{target}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        swallow(sock)

    return flood


def terminated(send: Send) -> Callable[[BoundSession, str, ssl.SSLContext], Send]:
    def made(session: BoundSession, target: str, context: ssl.SSLContext) -> Send:
        def flood(sock: socket.socket) -> None:
            sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            sock.recv(65536)
            with context.wrap_socket(sock, server_hostname=target.partition(":")[0]) as stream:
                stream.sendall(f"POST / HTTP/1.1\r\nHost: {target}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
                send(stream)

        return flood

    return made


def heads(session: BoundSession, target: str, _: ssl.SSLContext) -> Send:
    lines = "".join(f"a{number}: b\r\n" for number in range(240))

    def flood(sock: socket.socket) -> None:
        sock.sendall(f"GET http://{target}/ HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        sock.recv(65536)

    return flood


def trailers(session: BoundSession, target: str, _: ssl.SSLContext) -> Send:
    lines = "a:b\r\n" * 3000

    def flood(sock: socket.socket) -> None:
        sock.sendall(f"POST http://{target}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        sock.sendall(f"0\r\n{lines}\r\n".encode())
        sock.recv(65536)

    return flood


FLOODS = {
    "uploads in chunks of one byte": (upload, swallow),
    "downloads in chunks of one byte": (download, answer_in_chunks),
    "terminated uploads in chunks of one byte": (terminated(send_chunks), swallow),
    "terminated uploads in tiny records": (terminated(send_small_records), swallow),
    "terminated downloads in chunks of one byte": (terminated(swallow), answer_in_chunks),
    "connections with many headers": (heads, answer),
    "connections with many trailers": (trailers, answer),
}


@pytest.mark.parametrize(
    "kind",
    usual(
        FLOODS,
        but=(
            "downloads in chunks of one byte",
            "terminated uploads in chunks of one byte",
            "connections with many headers",
        ),
    ),
)
async def test_a_flood_of_small_pieces_does_not_hold_up_a_neighbour(
    internet: Internet, tmp_path: Path, kind: str
) -> None:
    make, serve = FLOODS[kind]
    is_terminated = kind.startswith("terminated")
    token = tmp_path / "token"
    token.write_text("of-the-test")
    token.chmod(0o600)
    tls, ca_file = None, internet.ca_file
    host, quiet = internet.name("raw"), internet.name("raw")
    if is_terminated:
        authority = Authority(tmp_path / "authority")
        pair = authority.site("site", host)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pair.cert, pair.key)
        ca_file = authority.cert
    with served(internet.address, serve, tls) as busy_port, served(internet.address, answer) as port:
        settings = settings_for(internet, ca_file=ca_file, secrets={"bot": token})
        async with egress_service(settings) as service:
            secrets = (NetworkSecret(host, "Authorization", "${bot}"),) if is_terminated else ()
            rules = NetworkRules(
                allowed=(f"{host}:{busy_port}",), secrets=secrets, max_new_connections_per_minute=100_000
            )
            session = await bind(service, rules, "busy")
            neighbour = await bind(service, NetworkRules(allowed=(f"{quiet}:{port}",)), "quiet")
            context = await sandbox_context(service)
            flood = make(session, f"{host}:{busy_port}", context)
            over = threading.Event()
            threads = [
                threading.Thread(target=_repeat, args=(flood, session.address, over), daemon=True)
                for _ in range(CONNECTIONS)
            ]
            calm = [await _time_of_request(neighbour, f"{quiet}:{port}") for _ in range(REQUESTS)]
            for thread in threads:
                thread.start()
            await session.sink.until(lambda: session.sink.sent_bytes + session.sink.received_bytes > 20_000)
            times = [await _time_of_request(neighbour, f"{quiet}:{port}") for _ in range(REQUESTS)]
            over.set()
            await service.close()
            for thread in threads:
                await asyncio.to_thread(thread.join)
    assert statistics.median(times) < max(MEDIAN_S, TIMES * statistics.median(calm)), (calm, times)


def _repeat(flood: Send, address: tuple[str, int], over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(OSError), socket.create_connection(address) as sock:
            flood(sock)


async def _time_of_request(session: BoundSession, target: str) -> float:
    began = time.monotonic()
    reader, writer = await session.connect()
    writer.write(f"GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    answered = await reader.read(-1)
    writer.close()
    assert answered.startswith(b"HTTP/1.1 200 "), answered
    return time.monotonic() - began
