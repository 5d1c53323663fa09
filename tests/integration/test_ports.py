"""Ports of a session, forwarded to the client: a server in the sandbox is used as if it were here."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import struct
import urllib.request
from collections.abc import Iterator

import pytest

from executor_client import (
    AsyncExecutorClient,
    ExecutorClient,
    ExecutorClientError,
    InvalidRequest,
    PreconditionError,
    ProcessOutput,
    Session,
)
from tests.support.daemon import Daemon
from tests.support.polling import eventually

WAIT_S = 20.0
CONNECTIONS = 1000
MOST_CONNECTIONS = 64
"""Connections at one time by the built-in policy."""
SERVER = """
import socket, threading

def serve(connection):
    kind = connection.recv(1)
    if kind == b"e":  # echoes, up to the end
        while data := connection.recv(65536):
            connection.sendall(data)
    elif kind == b"s":  # sends four megabytes, and counts what it gets meanwhile
        threading.Thread(target=connection.sendall, args=(b"x" * 4_000_000,)).start()
        count = 0
        while data := connection.recv(65536):
            count += len(data)
        print("got", count, flush=True)
    elif kind == b"f":  # floods, up to the reset
        while True:
            connection.sendall(bytes(65536))
    elif kind == b"d":
        connection.sendall(bytes(100_000))
    # Any other ends by a reset: what came behind it is not read.
    connection.close()

listener = socket.create_server((ADDRESS, 9000), family=FAMILY)
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,)).start()
"""


@pytest.fixture
def session(client: ExecutorClient) -> Iterator[Session]:
    with client.create_session() as made:
        yield made


def serve(session: Session, address: str = "127.0.0.1") -> None:
    """Runs the server in the sandbox; returns when it listens."""
    family = "socket.AF_INET6" if ":" in address else "socket.AF_INET"
    session.files.write("server.py", SERVER.replace("ADDRESS", repr(address)).replace("FAMILY", family).encode())
    for _ in session.processes.start(["python3", "server.py"]):
        return


def received(connection: socket.socket) -> bytes:
    connection.settimeout(WAIT_S)
    data = bytearray()
    while piece := connection.recv(65536):
        data += piece
    return bytes(data)


def test_a_web_server_of_a_session_is_reached_through_a_local_port(session: Session) -> None:
    session.files.write("index.html", b"<h1>made by an agent</h1>")
    with session.ports.forward(8000) as forward:
        assert forward.address[0] == "127.0.0.1" and forward.local_port
        with pytest.raises(OSError, match=r"."):
            urllib.request.urlopen(forward.url, timeout=WAIT_S)
        assert eventually(lambda: getattr(forward.last_error, "reason", "") == "PORT_CLOSED")
        session.processes.start(["python3", "-m", "http.server", "8000"])

        def served() -> bool:
            try:
                page: bytes = urllib.request.urlopen(forward.url, timeout=WAIT_S).read()
                return page == b"<h1>made by an agent</h1>"
            except OSError:
                return False

        assert eventually(served)
        assert forward.connections >= 2
    with pytest.raises(OSError, match=r"."):
        socket.create_connection(forward.address, timeout=WAIT_S)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_each_side_may_end_its_direction_and_still_read(session: Session, address: str) -> None:
    serve(session, address)
    with session.ports.connect(9000) as connection:
        connection.sendall(b"ehello")
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == b"hello"


def test_megabytes_go_both_ways_unharmed(session: Session) -> None:
    serve(session)
    data = hashlib.sha256(b"seed").digest() * 131_072
    with session.ports.connect(9000) as connection, session.ports.connect(9000) as other:
        connection.settimeout(WAIT_S)
        other.sendall(b"e" + b"beside")
        connection.sendall(b"s" + data)
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == b"x" * 4_000_000
        other.shutdown(socket.SHUT_WR)
        assert received(other) == b"beside"


def test_one_that_reads_nothing_holds_up_no_other(session: Session) -> None:
    serve(session)
    with session.ports.connect(9000) as idle, session.ports.connect(9000) as connection:
        idle.sendall(b"s")
        connection.sendall(b"eok")
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == b"ok"
        assert session.execute("1 + 1").output == 2


def test_a_port_that_nothing_listens_on_and_one_that_is_none_are_refused(session: Session) -> None:
    with pytest.raises(PreconditionError) as refused:
        session.ports.connect(9)
    assert refused.value.reason == "PORT_CLOSED"
    for port in (0, 65_536):
        with pytest.raises(InvalidRequest):
            session.ports.connect(port)


def test_a_connection_that_the_program_resets_is_cut_off_here(session: Session) -> None:
    serve(session)
    errors: list[ExecutorClientError] = []
    forwarding = session.ports.forward(9000, on_error=errors.append)
    with forwarding as forward, socket.create_connection(forward.address) as connection:
        connection.settimeout(WAIT_S)
        connection.sendall(b"reset")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
        assert eventually(lambda: bool(errors))
    assert [error.reason for error in errors] == ["PORT_RESET"] and forward.last_error is errors[0]


def test_a_connection_that_is_reset_here_is_cut_off_there(session: Session) -> None:
    """A server that only waits for its client would keep it for ever."""
    waiting = "import socket\nwith socket.create_server(('127.0.0.1', 9000)) as listener:\n" + (
        "  print('listening', flush=True)\n  connection, _ = listener.accept()\n  print(connection.recv(1), flush=True)\n"
        "  try: print('ended', connection.recv(1), flush=True)\n  except ConnectionError: print('cut off', flush=True)\n"
    )
    process = session.processes.start(["python3", "-c", waiting])
    events = iter(process)
    assert isinstance(next(events), ProcessOutput)
    with session.ports.forward(9000) as forward:
        connection = socket.create_connection(forward.address)
        connection.sendall(b"x")
        assert isinstance(next(events), ProcessOutput)  # the server has it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        assert b"".join(each.data for each in events if isinstance(each, ProcessOutput)) == b"cut off\n"


def test_a_thousand_connections_are_served_or_refused_and_leave_nothing(session: Session) -> None:
    """More than the policy allows at a time come at once: each of them ends, and later ones are served."""
    serve(session)
    with session.ports.forward(9000) as forward:
        held = []
        for _ in range(CONNECTIONS):
            with contextlib.suppress(ConnectionResetError):  # it may be refused before this has returned
                held.append(socket.create_connection(forward.address))
        for connection in held:
            with contextlib.suppress(ConnectionError):  # or by now
                connection.sendall(b"e!")
        answered = 0
        for connection in held:
            connection.settimeout(WAIT_S)
            with contextlib.suppress(ConnectionError):
                answered += connection.recv(1) == b"!"
        assert answered == MOST_CONNECTIONS
        assert getattr(forward.last_error, "reason", "") == "TOO_MANY_CONNECTIONS"
        assert session.execute("1 + 1").output == 2
        for connection in held:
            connection.close()

        def served() -> bool:
            with contextlib.suppress(ConnectionError), socket.create_connection(forward.address) as connection:
                connection.sendall(b"elater")
                connection.shutdown(socket.SHUT_WR)
                return received(connection) == b"later"
            return False

        assert eventually(served)
        assert forward.connections > CONNECTIONS


@pytest.mark.parametrize("kind", [b"d.", b"f"], ids=["by the program", "by the end of the session"])
@pytest.mark.parametrize("is_forwarded", [True, False], ids=["forward", "connect"])
def test_a_download_that_is_cut_off_does_not_end_as_if_it_were_whole(
    client: ExecutorClient, kind: bytes, is_forwarded: bool
) -> None:
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(client.create_session())
        serve(session)
        if is_forwarded:
            forward = stack.enter_context(session.ports.forward(9000))
            connection = socket.create_connection(forward.address)
        else:
            connection = session.ports.connect(9000)
        stack.enter_context(connection)
        connection.sendall(kind)
        assert connection.recv(1) == b"\0"
        if kind == b"f":
            session.close()
        with pytest.raises(ConnectionResetError):
            received(connection)


@pytest.mark.parametrize("kind", [b"d.", b"f"], ids=["by the program", "by the end of the session"])
@pytest.mark.parametrize("is_forwarded", [True, False], ids=["forward", "connect"])
async def test_nor_does_it_in_the_asyncio_client(
    client: ExecutorClient, daemon: Daemon, kind: bytes, is_forwarded: bool
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        asyncio_client = await stack.enter_async_context(AsyncExecutorClient(**daemon.access))
        session = await stack.enter_async_context(await asyncio_client.create_session())
        serve(client.get_session(session.session_id))
        if is_forwarded:
            forward = await stack.enter_async_context(await session.ports.forward(9000))
            reader, writer = await asyncio.open_connection(*forward.address)
        else:
            reader, writer = await session.ports.connect(9000)
        stack.callback(writer.close)
        writer.write(kind)
        assert await reader.read(1) == b"\0"
        if kind == b"f":
            await session.close()
        with pytest.raises(ConnectionResetError):
            while await asyncio.wait_for(reader.read(65536), WAIT_S):
                pass


async def test_the_asyncio_client_forwards_in_its_own_loop(daemon: Daemon) -> None:
    async with AsyncExecutorClient(**daemon.access) as client, await client.create_session() as session:
        await session.files.write("server.py", SERVER.replace("ADDRESS", "'127.0.0.1'").replace("FAMILY", "2").encode())
        process = await session.processes.start(["python3", "server.py"])
        async for _ in process:
            break
        async with await session.ports.forward(9000) as forward:
            readers = [await asyncio.open_connection(*forward.address) for _ in range(20)]
            for number, (_, writer) in enumerate(readers):
                writer.write(b"e%d" % number)
                writer.write_eof()
            assert [await reader.read() for reader, _ in readers] == [b"%d" % number for number in range(20)]
            for _, writer in readers:
                writer.close()
        process.close()
