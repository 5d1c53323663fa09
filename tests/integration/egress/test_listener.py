"""A sandbox's first process that was taken over: it has the listener that the proxy accepts from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executor_server.core.network import NetworkRules
from executor_server.guest.egress.accepting import MAX_ACCEPT_S, AcceptInterrupted, Acceptor
from executor_server.guest.egress.host_rules import Rules
from tests.support.egress_engine import SOON_S, echo, engine
from tests.support.egress_service import bind, egress_service

ASKED = b"CONNECT denied.example:443 HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    acceptor = Acceptor()
    yield acceptor
    acceptor.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield listener


def _attack(held: socket.socket) -> Callable[[int], bool]:
    """The attack at its best moment: after the last look at the flag, and before the accept. Takes the place of
    os.get_blocking, takes the connection away and makes the listener block."""
    real = os.get_blocking

    def get_blocking(descriptor: int) -> bool:
        before = real(descriptor)
        if not before:
            with contextlib.suppress(BlockingIOError), held.accept()[0]:
                held.setblocking(True)
        return before

    return get_blocking


class InterruptedListener(socket.socket):
    """A signal comes after the kernel has accepted and before the program has the connection."""

    def accept(self) -> tuple[socket.socket, Any]:
        accepted = super().accept()
        signal.raise_signal(signal.SIGALRM)
        return accepted


class BlockedListener(socket.socket):
    """Its other holder makes it block again after each interruption."""

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except BlockingIOError:
            self.setblocking(True)
            return super().accept()


async def _is_served(address: tuple[str, int]) -> bool:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(ASKED)
    async with asyncio.timeout(SOON_S):
        answer = await reader.read(-1)
    writer.close()
    assert answer, answer
    return answer.startswith(b"HTTP/1.1 403 ")


def test_an_accept_that_blocks_is_interrupted_and_the_timer_and_handler_of_before_are_back(
    listener: socket.socket,
) -> None:
    handler, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    acceptor = Acceptor()
    began = time.monotonic()
    with pytest.raises(AcceptInterrupted):
        acceptor.accept(listener)
    assert MAX_ACCEPT_S <= time.monotonic() - began < SOON_S / 2
    acceptor.close()
    assert signal.getsignal(signal.SIGALRM) is handler
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) is (timer[0] > 0)


def test_a_time_limit_of_the_listener_that_its_other_holder_takes_away_is_not_needed(
    listener: socket.socket, acceptor: Acceptor
) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3600, 0))
    with pytest.raises(AcceptInterrupted):
        acceptor.accept(listener)


def test_an_accepted_connection_is_not_lost_when_the_time_is_over(listener: socket.socket, acceptor: Acceptor) -> None:
    """A busy host may let the proxy wait for a processor so long at any moment."""
    with (
        InterruptedListener(fileno=os.dup(listener.fileno())) as interrupted,
        socket.create_connection(listener.getsockname()) as client,
        acceptor.accept(interrupted) as accepted,
    ):
        assert accepted.getpeername() == client.getsockname()


def test_an_accept_that_blocks_again_after_an_interruption_ends(listener: socket.socket, acceptor: Acceptor) -> None:
    began = time.monotonic()
    with BlockedListener(fileno=os.dup(listener.fileno())) as blocked, pytest.raises(AcceptInterrupted):
        acceptor.accept(blocked)
    assert time.monotonic() - began < SOON_S / 2


async def test_session_whose_listener_blocks_the_proxy_is_given_up_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    async with engine() as running:
        other = socket.create_server(("127.0.0.1", 0))
        address = other.getsockname()
        with listener.dup() as held:
            running.proxy.serve("hostile", listener.dup(), Rules.read({}))
            monkeypatch.setattr(os, "get_blocking", _attack(held))
            began = time.monotonic()
            for _ in range(3):
                with socket.create_connection(listener.getsockname()):
                    await asyncio.sleep(2 * MAX_ACCEPT_S)
            await running.recorder.until(lambda: running.recorder.misused_sessions)
            assert time.monotonic() - began < SOON_S / 2
            monkeypatch.undo()
            running.proxy.serve("other", other, Rules.read({}))
            assert await _is_served(address)
        assert running.recorder.misused_sessions == ["hostile"]


async def test_listener_that_blocks_already_is_not_accepted_from(listener: socket.socket) -> None:
    async with engine() as running:
        with listener.dup() as held:
            running.proxy.serve("hostile", listener.dup(), Rules.read({}))
            held.setblocking(True)
            with socket.create_connection(listener.getsockname()):
                await running.recorder.until(lambda: running.recorder.misused_sessions)


async def test_daemon_learns_of_it_and_the_process_goes_on_serving() -> None:
    async with egress_service() as service:
        hostile = await bind(service, NetworkRules(), "hostile")
        pid, held = service.pid, service._sessions["hostile"].listener
        assert held is not None
        held.setblocking(True)  # the same open socket as the process has
        with socket.create_connection(hostile.address):
            await hostile.sink.until(lambda: hostile.sink.reports)
        assert hostile.sink.reports == ["misused"]
        other = await bind(service, NetworkRules(), "other")
        assert await _is_served(other.address)
        assert service.pid == pid


async def test_options_of_the_listener_do_not_make_the_proxy_wait_in_close(
    listener: socket.socket, acceptor: Acceptor
) -> None:
    """A socket that lingers would keep the loop in close until its peer has read, and this one never reads."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 30))
    with socket.create_connection(listener.getsockname()), acceptor.accept(listener) as accepted:
        assert struct.unpack("ii", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0] == 0


async def test_refused_connection_gives_its_place_back_when_the_answer_is_sent() -> None:
    """And not when its client has closed: clients keep what they were refused open for a while."""
    async with engine(linger_s=30.0) as running:
        port = await running.start_server(echo)
        running.allow("gone.example:443", f"a.example:{port}", max_connections=1)
        del running.names.answers["gone.example"]
        reader, writer = await running.connect()
        writer.write(b"CONNECT gone.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 502 ")
        await running.tunnel(f"a.example:{port}")
