"""A session that floods the proxy, stalls it or lies to it costs itself alone."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from executor_server.guest.egress import reasons, splice
from executor_server.guest.egress.dial import DirectConnector
from executor_server.guest.egress.endpoint import CHUNK_BYTES
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.host_rules import Rules
from tests.security.egress_program import proxy_process
from tests.support.egress_engine import SOON_S, client_hello, echo, engine
from tests.support.memory import growth_of
from tests.support.polling import eventually, eventually_async
from tests.support.rounds import rounds

MIB = 2**20
DENIED = b"CONNECT %d.denied.example:443 HTTP/1.1\r\nHost: x\r\n\r\n"


def _deny(address: tuple[str, int], number: int = 0) -> float:
    """Seconds until the refusal of one connection."""
    began = time.monotonic()
    with socket.create_connection(address, SOON_S) as client:
        client.sendall(DENIED % number)
        assert client.recv(4096).startswith(b"HTTP/1.1 403 ")
    return time.monotonic() - began


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@contextmanager
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_denied_names_without_number_leave_no_memory_behind() -> None:
    with proxy_process(accepts_per_s=2000) as (pid, (address,)):
        for number in range(100):
            _deny(address, number)
        growth = growth_of(pid)
        for number in range(rounds(10_000, 1_500)):
            _deny(address, number)
        assert growth()[0] < 16 * MIB
        assert eventually(lambda: _descriptors(pid) < 30)


@pytest.mark.parametrize("sent", [b"", b"CONNECT a", b"x"], ids=["silent", "part of a head", "garbage"])
def test_ten_thousand_connections_of_one_session_do_not_delay_another(sent: bytes) -> None:
    count = rounds(10_000, 2_000)
    with _many_descriptors(), proxy_process(sessions=2) as (pid, (flooded, other)), ExitStack() as stack:
        growth = growth_of(pid)
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(flooded)
            if sent:
                try:
                    client.send(sent)
                except OSError:
                    continue  # not connected yet: it waits for room in the backlog
        times = sorted(_deny(other, number) for number in range(50))
        assert times[25] < 0.25, "a loaded machine needs a few ms"
        assert _descriptors(pid) < 100
        assert growth()[0] < 16 * MIB


def test_refusals_of_one_session_are_paced_and_another_is_served_at_once() -> None:
    with proxy_process(sessions=2) as (_, (flooded, other)):
        began = time.monotonic()
        for number in range(80):
            _deny(flooded, number)
        assert time.monotonic() - began > 0.9, "a burst of what it may connect in a minute, and then twenty a second"
        assert min(_deny(other, number) for number in range(5)) < 0.25


async def test_head_that_does_not_end_is_refused_and_a_silent_connection_just_closed() -> None:
    async with engine(head_s=0.05) as running:
        assert (await running.ask(b"CONNECT a.example:443 HTTP/1.1\r\n")).startswith(b"HTTP/1.1 408 ")
        assert await running.ask(b"") == b""
        assert [denial["reason"] for denial in running.recorder.denials] == [reasons.HEAD_TIMEOUT]


async def test_head_of_a_megabyte_is_refused_with_an_answer_that_arrives() -> None:
    async with engine() as running:
        for head in (b"GET / HTTP/1.1\r\nX: " + b"x" * MIB, b"x" * MIB, b"CONNECT a.example:443 HTTP/1.1\r\n" * 30_000):
            assert (await running.ask(head))[:12] in {b"HTTP/1.1 431", b"HTTP/1.1 400"}


async def test_a_byte_at_a_time_does_not_extend_the_time_for_a_head() -> None:
    async with engine(head_s=0.2) as running:
        reader, writer = await running.connect()

        async def trickle() -> None:
            while not writer.transport.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.005)

        trickling = asyncio.create_task(trickle())
        async with asyncio.timeout(SOON_S):
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 408 ")
        writer.transport.abort()
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def test_tunnel_without_its_clienthello_is_closed_in_time() -> None:
    async with engine(head_s=0.05) as running:
        running.allow("a.example:443", "a.example:80")
        with socket.create_server(("127.0.0.1", 0)) as upstream:

            class ToUpstream:
                async def connect(self, target: object, address: str, deadline: float) -> socket.socket:
                    sock = socket.create_connection(upstream.getsockname())
                    sock.setblocking(False)
                    return sock

            running.proxy._sessions["session-1"].dialer._connector = ToUpstream()
            for authority, part in (
                ("a.example:443", client_hello("a.example")[:-1]),
                ("a.example:80", b"GET / HTTP/1.1\r\n"),
                ("a.example:443", b""),
            ):
                reader, writer = await running.tunnel(authority)
                writer.write(part)
                async with asyncio.timeout(SOON_S):
                    await reader.read(-1)
            await running.recorder.last_closed(3)
        assert {record["reason"] for record in running.recorder.closed_connections} == {reasons.HEAD_TIMEOUT}
        assert len(running.recorder.denials) == 2, "a tunnel that was never used is no offence"


async def test_half_closed_tunnels_that_fall_silent_are_closed() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        await asyncio.get_running_loop().create_future()

    async with engine(half_closed_s=0.05) as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}")
        with socket.create_server(("127.0.0.1", 0)) as never_accepts:
            port = never_accepts.getsockname()[1]
            running.allow(f"b.example:{port}")
            tunnels = [await running.tunnel(f"b.example:{port}") for _ in range(20)]
            for _, writer in tunnels:
                writer.write_eof()
            for reader, _ in tunnels:
                async with asyncio.timeout(SOON_S):
                    assert await reader.read(-1) == b""
        await running.recorder.last_closed(20)


async def test_client_that_does_not_read_stops_its_server_and_keeps_no_memory() -> None:
    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()

    async with engine() as running:
        port = await running.start_server(pours)
        running.allow(f"a.example:{port}", max_received_bytes=1024 * MIB)
        client = socket.create_connection(running.address, SOON_S)
        with client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(
                client, f"CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
            )
            await running.recorder.until(lambda: running.recorder.received_bytes)

            async def stands_still() -> bool:
                before = running.recorder.received_bytes
                await asyncio.sleep(0.3)  # more than one period of reports
                return running.recorder.received_bytes == before

            async with asyncio.timeout(SOON_S):
                while not await stands_still():
                    pass
            assert running.recorder.received_bytes < 16 * MIB, "what the kernel's buffers hold"
        assert (await running.recorder.last_closed())["reason"] in {reasons.BROKEN, reasons.ENDED}


def _hold_more_than(count: int) -> bool:
    return splice._Held.bytes > count


async def test_tunnels_whose_clients_do_not_read_hold_little_where_there_are_many() -> None:
    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(bytes(MIB))
            await writer.drain()

    async with engine(held_bytes=10_000) as running:
        port = await running.start_server(pours)
        running.allow(f"a.example:{port}", max_received_bytes=2**40)
        before = splice._Held.bytes
        for _ in range(10):
            _, writer = await running.tunnel(f"a.example:{port}")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            held = splice._Held.bytes
            assert await eventually_async(partial(_hold_more_than, held))
        assert splice._Held.bytes - before <= 10_000 + CHUNK_BYTES + 10 * 4096
    assert splice._Held.bytes == before


async def test_refused_clients_that_do_not_close_make_room_for_others() -> None:
    async with engine(linger_s=0.05, waiting=4) as running:
        clients = [await running.connect() for _ in range(8)]
        for reader, writer in clients:
            writer.write(DENIED % 1)
            async with asyncio.timeout(SOON_S):
                assert (await reader.read(4096)).startswith(b"HTTP/1.1 403 ")


async def test_chunks_of_one_byte_do_not_keep_the_loop() -> None:
    """h11 takes 15 µs for each, and neither reads nor writes would ever wait between two quick peers."""

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 300_000)
        await writer.drain()

    async with engine() as running:
        port = await running.start_server(drips)
        running.allow(f"a.example:{port}")
        _, writer = await running.connect()
        writer.write(f"GET http://a.example:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await running.recorder.until(lambda: running.recorder.received_bytes)
        loop, longest = asyncio.get_running_loop(), 0.0
        for _ in range(100):
            began = loop.time()
            await asyncio.sleep(0)
            longest = max(longest, loop.time() - began)
        assert longest < 1.0, "all chunks take 4.5 s"


async def test_proxy_without_descriptors_serves_again_when_it_has_some() -> None:
    async with engine() as running:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.socket()
        with client:
            client.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
            try:
                await asyncio.get_running_loop().sock_connect(client, running.address)
                await asyncio.sleep(0.05)  # it fails to accept, again and again
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await asyncio.get_running_loop().sock_sendall(client, DENIED % 1)
            async with asyncio.timeout(SOON_S):
                answer = await asyncio.get_running_loop().sock_recv(client, 4096)
            assert answer.startswith(b"HTTP/1.1 403 ")


async def test_a_session_with_all_the_connections_it_can_get_leaves_others_their_part() -> None:
    """All sessions share the descriptors of the process."""
    async with engine(descriptors=64) as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}")
        greedy = [await running.connect() for _ in range(30)]
        for _, writer in greedy:
            writer.write(f"CONNECT a.example:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await running.recorder.until(lambda: len(running.recorder.opened_connections) >= 13)
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        running.proxy.serve("other", listener, Rules.read(running.rules))
        others = replace(running, address=address)
        for _ in range(6):
            await others.tunnel(f"a.example:{port}")
        opened = len(running.recorder.opened_connections)
        assert opened == 13 + 6, "of 64 descriptors an eighth is kept, and each connection has two"
        for _, writer in greedy[:8]:
            writer.close()
        await running.recorder.until(lambda: len(running.recorder.opened_connections) > opened)


class Unanswered:
    """As DirectConnector, but the host at 192.0.2.1 never answers."""

    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        if address == "192.0.2.1":
            await asyncio.get_running_loop().create_future()
        return await DirectConnector().connect(target, address, deadline)


@pytest.mark.parametrize("kind", ["one name that hangs", "names that hang", "a host that hangs"])
async def test_connections_that_wait_for_what_hangs_leave_others_their_turn(kind: str) -> None:
    """Also where they are more than the session may have at one time, and more than may wait before they are made."""
    async with engine(connector=Unanswered(), waiting=4) as running:
        port = await running.start_server(echo)
        count = 20 if kind == "a host that hangs" else 60
        running.allow(f"a.example:{port}", "*.hangs.example", max_connections=32)
        for number in range(count):
            host = "one.hangs.example" if kind == "one name that hangs" else f"{number % 30}.hangs.example"
            running.names.hanging.add(host)
            if kind == "a host that hangs":
                running.names.hanging.clear()
                running.name(host, ("192.0.2.1",))
            _, writer = await running.connect()
            writer.write(f"CONNECT {host}:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await running.tunnel(f"a.example:{port}")
        assert running.recorder.denials == []


async def test_connections_that_wait_for_names_are_bounded() -> None:
    async with engine(resolving=3) as running:
        running.allow("a.hangs.example")
        running.names.hanging.add("a.hangs.example")
        for _ in range(4):
            _, writer = await running.connect()
            writer.write(b"CONNECT a.hangs.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        await running.recorder.until(lambda: running.recorder.denials)
        assert [each["reason"] for each in running.recorder.denials] == [reasons.TOO_MANY_CONNECTIONS]


async def test_names_that_hang_take_nothing_from_names_that_do_not() -> None:
    async with engine(resolutions=2, resolve_s=0.2) as running:
        port = await running.start_server(echo)
        running.allow(f"a.example:{port}", "*.hangs.example")
        await running.tunnel(f"a.example:{port}")
        for number in range(10):
            running.names.hanging.add(f"{number}.hangs.example")
            _, writer = await running.connect()
            writer.write(b"CONNECT %d.hangs.example:443 HTTP/1.1\r\nHost: x\r\n\r\n" % number)
        async with asyncio.timeout(SOON_S):
            await running.names.hung.wait()
        await running.tunnel(f"a.example:{port}")  # cached
        assert await eventually_async(lambda: len(running.recorder.denials) == 10)
        assert running.names.most_in_flight == 2
