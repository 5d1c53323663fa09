"""Forwarded ports of a session: servers in the sandbox, reached from outside without a network, hostile ones too."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
from contextlib import AsyncExitStack
from typing import Any

import pytest

from executor_server.core import (
    ExecutorError,
    PolicyViolation,
    PortRules,
    PreconditionFailed,
    ProcessOutput,
    ProcessRequest,
    Reason,
    ResourceExhausted,
    Unavailable,
)
from executor_server.sessions import Session
from tests.contract.harness import Harness
from tests.contract.marks import promise

WAIT_S = 20.0
MANY = 40

# The first byte of a connection says what the server does with it.
SERVER = """
import hashlib, os, socket, threading

threading.stack_size(256 * 1024)  # a limit on memory counts what stacks reserve, where no control group is the wall

def serve(connection):
    kind = connection.recv(1)
    if kind == b"e":  # echoes, up to the end
        while data := connection.recv(65536):
            connection.sendall(data)
    elif kind == b"d":  # answers with a digest of all that came
        digest = hashlib.sha256()
        while data := connection.recv(65536):
            digest.update(data)
        connection.sendall(digest.digest())
    elif kind == b"s":  # ends its direction first, and reads on
        connection.sendall(b"all")
        connection.shutdown(socket.SHUT_WR)
        print("then", len(connection.recv(65536)), flush=True)
    elif kind == b"i":  # reads nothing
        threading.Event().wait()
    elif kind == b"f":  # floods
        while True:
            connection.sendall(bytes(65536))
    elif kind == b"w":  # says how its client's direction ends
        try:
            while connection.recv(65536):
                pass
            print("ended", flush=True)
        except ConnectionError:
            print("cut off", flush=True)
    elif kind == b"m":
        connection.sendall(bytes(100_000))
        connection.recv(1, socket.MSG_PEEK)
    elif kind == b"r":
        connection.recv(1, socket.MSG_PEEK)  # data that came and was not read makes a reset of the end
    elif kind == b"x":
        os._exit(0)
    connection.close()

listener = socket.create_server((ADDRESS, PORT), family=FAMILY, backlog=128)
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
"""


async def serve(session: Session, address: str = "127.0.0.1", port: int = 9000) -> None:
    """Runs the server in the sandbox; returns when it listens."""
    family = "socket.AF_INET6" if ":" in address else "socket.AF_INET"
    code = SERVER.replace("ADDRESS", repr(address)).replace("FAMILY", family).replace("PORT", str(port))
    log = await session.processes.start(ProcessRequest(f"server-{port}", ("python3", "-c", code)))
    async with asyncio.timeout(WAIT_S):
        async for event in log.events_with_gap(0):
            if isinstance(event.kind, ProcessOutput):
                assert event.kind.data == b"listening\n"
                return


async def end_input(connection: Any) -> None:
    ended = connection.end_input()
    if inspect.isawaitable(ended):
        await ended


async def rest(connection: Any) -> bytes:
    """Reads to the end."""
    data = bytearray()
    async with asyncio.timeout(WAIT_S):
        while piece := await connection.read():
            data += piece
    return bytes(data)


async def asked(session: Session, kind: bytes, data: bytes = b"", port: int = 9000) -> bytes:
    """Sends it, ends, and returns the whole answer."""
    async with session.ports.open(port) as connection:
        await connection.write(kind + data)
        await end_input(connection)
        return await rest(connection)


@promise("ports")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
async def test_a_server_in_the_sandbox_is_reached_without_a_network(harness: Harness, address: str) -> None:
    session = await harness.session()
    await serve(session, address)
    assert await asked(session, b"e", b"hello") == b"hello"


@promise("ports")
async def test_a_server_that_ends_its_direction_first_reads_on(harness: Harness) -> None:
    session = await harness.session()
    await serve(session)
    async with session.ports.open(9000) as connection:
        await connection.write(b"s")
        assert await rest(connection) == b"all"
        await connection.write(b"behind")
        await end_input(connection)
        async for event in (await session.processes.start(_server())).events_with_gap(0):
            if isinstance(event.kind, ProcessOutput) and b"then 6" in event.kind.data:
                return
    raise AssertionError("the server got nothing after its end")


def _server() -> ProcessRequest:
    """The request of the server that runs: the same id and command are the same process."""
    code = SERVER.replace("ADDRESS", "'127.0.0.1'").replace("FAMILY", "socket.AF_INET").replace("PORT", "9000")
    return ProcessRequest("server-9000", ("python3", "-c", code))


@promise("ports")
async def test_megabytes_arrive_whole_both_ways_and_others_go_on_meanwhile(harness: Harness) -> None:
    session = await harness.session()
    await serve(session)
    data = hashlib.sha256(b"seed").digest() * 524_288  # 16 MiB
    async with AsyncExitStack() as stack:
        for kind in (b"i", b"f"):  # one that reads nothing, and one whose flood no client reads
            idle = await stack.enter_async_context(session.ports.open(9000))
            await idle.write(kind)
        digest, echo = await asyncio.gather(asked(session, b"d", data), _echoed(session, data[: 4 * 2**20]))
        assert digest == hashlib.sha256(data).digest()
        assert echo == data[: 4 * 2**20]
        assert (await harness.run(session, "1 + 1")).output == 2


async def _echoed(session: Session, data: bytes) -> bytes:
    """Writes and reads at the same time, as an echo of more than a window needs."""
    async with session.ports.open(9000) as connection:

        async def send() -> None:
            await connection.write(b"e" + data)
            await end_input(connection)

        sending = asyncio.create_task(send())
        echo = await rest(connection)
        await sending
        return echo


@promise("ports")
async def test_a_port_that_nothing_listens_on_is_told(harness: Harness) -> None:
    session = await harness.session()
    with pytest.raises(PreconditionFailed) as refused:
        async with session.ports.open(9):
            raise AssertionError("it is open")
    assert refused.value.reason is Reason.PORT_CLOSED


@promise("ports")
@pytest.mark.parametrize("kind", [b"r", b"m", b"x"], ids=["reset", "in the middle", "the end of the process"])
async def test_a_connection_that_breaks_is_told_as_broken_and_not_as_ended(harness: Harness, kind: bytes) -> None:
    session = await harness.session()
    await serve(session)
    if kind != b"x":
        with pytest.raises(Unavailable) as broken:
            await asked(session, kind, b"unread")
        assert broken.value.reason is Reason.PORT_RESET
        return
    with contextlib.suppress(Unavailable):  # a killed program's socket ends in order when it has read everything
        assert await asked(session, kind) == b""
    # Refused; or cut off, when the kernel had taken it before it closed the listener.
    with pytest.raises((PreconditionFailed, Unavailable)):
        await asked(session, b"e")


@promise("ports")
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "left"])
async def test_a_program_can_tell_a_client_that_has_ended_from_one_that_is_gone(harness: Harness, ends: bool) -> None:
    """A client that is gone has not sent all that there was."""
    session = await harness.session()
    await serve(session)
    async with session.ports.open(9000) as connection:
        await connection.write(b"w" + bytes(100_000))
        if ends:
            await end_input(connection)
            assert await rest(connection) == b""
    async with asyncio.timeout(WAIT_S):
        async for event in (await session.processes.start(_server())).events_with_gap(0):
            if isinstance(event.kind, ProcessOutput) and event.kind.data != b"listening\n":
                assert event.kind.data == (b"ended\n" if ends else b"cut off\n")
                return


@promise("ports")
async def test_many_connections_are_served_and_one_too_many_is_refused(harness: Harness) -> None:
    session = await harness.session(processes=128)  # the server has a thread for each
    await serve(session)
    answers = await asyncio.gather(*(asked(session, b"e", b"%d" % number) for number in range(MANY)))
    assert answers == [b"%d" % number for number in range(MANY)]
    async with AsyncExitStack() as stack:
        for _ in range(PortRules().max_connections):
            connection = await stack.enter_async_context(session.ports.open(9000))
        with pytest.raises(ResourceExhausted) as refused:
            async with session.ports.open(9000):
                raise AssertionError("it is open")
        assert refused.value.reason is Reason.TOO_MANY_CONNECTIONS
        await connection.write(b"e!")
        await end_input(connection)
        assert await rest(connection) == b"!"


@promise("ports")
async def test_the_policy_decides_which_ports(harness: Harness) -> None:
    session = await harness.session_under("")
    await serve(session)
    for allowed in ("[]", '["8000-8999", "9001-65535"]'):
        await harness.change_policy(session, f"ports.allowed = {allowed}")
        with pytest.raises(PolicyViolation):
            await asked(session, b"e")
    await harness.change_policy(session, 'ports.allowed = ["9000"]')
    assert await asked(session, b"e", b"yes") == b"yes"


@promise("ports")
@pytest.mark.parametrize("kind", [b"e!", b"f"], ids=["echo", "flood"])
async def test_the_end_of_the_session_is_the_end_of_its_connections(harness: Harness, kind: bytes) -> None:
    session = await harness.session()
    await serve(session)
    async with session.ports.open(9000) as connection:
        await connection.write(kind)
        assert await connection.read()
        await harness.end_sessions()
        with pytest.raises(ExecutorError):
            await rest(connection)
