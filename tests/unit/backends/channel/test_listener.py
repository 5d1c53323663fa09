"""The egress proxy's listener leaves the sandbox: only for the daemon's token, and only if it is that listener."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from executor_server.backends.channel import listener as daemons_end
from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.backends.channel.endpoint import RefusedError, SocketEndpoint, UnreachedError
from executor_server.core.errors import SandboxFailure
from executor_server.guest.wire.frames import PROTOCOL_VERSION, Frame, Kind, encode_frame
from executor_server.guest.wire.guest_channel import Channel
from executor_server.guest.wire.loop import Loop
from executor_server.guest.wire.messages import Cancel, Ready
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained
from tests.support.descriptors import none_left_open
from tests.support.polling import eventually_async

TOKEN = bytes(range(32))
FIRST = chained(TOKEN, CHAIN_LENGTH - 1).hex()
ANSWER = encode_frame(Kind.LISTENER, {})


def made_listener(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    listener = socket.socket()
    listener.bind((host, port))
    listener.listen(4)
    return listener


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A listener as a sandbox has it, but for its port: there is one of those on this host, in no sandbox."""
    with made_listener() as listener:
        monkeypatch.setattr(daemons_end, "LISTENER_ADDRESS", listener.getsockname())
        yield listener


class Guest:
    """A guest's end of the channel, turned by the event loop of the test."""

    def __init__(self, path: Path, listener: socket.socket | None) -> None:
        self.endpoint = SocketEndpoint(path, TOKEN)
        self.heard: list[Frame] = []
        own = socket.socket(socket.AF_UNIX)
        own.bind(str(path))
        own.listen(8)
        self._turning = Loop()
        handed_out = None if listener is None else os.dup(listener.fileno())
        token_hash = chained(TOKEN, CHAIN_LENGTH).hex()
        self.channel = Channel(own, token_hash, self._turning, self.heard.append, self._describe, handed_out)
        asyncio.get_running_loop().add_reader(self._turning._poll.fileno(), self._turning.turn, 0)

    def _describe(self, last_seq: int, acked: int) -> Ready:
        return Ready(protocol=PROTOCOL_VERSION, python="3.11.0", generation=1, last_seq=last_seq, acked=acked)

    async def close(self) -> None:
        await eventually_async(lambda: not self.channel.connected)
        asyncio.get_running_loop().remove_reader(self._turning._poll.fileno())
        self.channel.close_all()
        self._turning.close()


@pytest.fixture
async def guest(tmp_path: Path, listener: socket.socket) -> AsyncIterator[Guest]:
    with none_left_open():
        guest = Guest(tmp_path / "guest", listener)
        yield guest
        await guest.close()


def inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


async def test_a_daemon_gets_the_listener_and_keeps_its_connection(guest: Guest, listener: socket.socket) -> None:
    channel = GuestChannel(guest.endpoint)
    await channel.connect()
    with await channel.take_listener() as taken:
        assert inode(taken) == inode(listener)
        assert not taken.get_inheritable() and not taken.getblocking()
    assert channel.connections == 2
    channel.send(Cancel(id="e"))
    assert await eventually_async(lambda: [frame.kind for frame in guest.heard] == [Kind.CANCEL])
    channel.close()


async def test_the_next_daemon_gets_it_again(guest: Guest, listener: socket.socket) -> None:
    first = GuestChannel(guest.endpoint)
    await first.connect()
    (await first.take_listener()).close()
    first.close()  # all that is left of a killed daemon is its count of tokens
    second = GuestChannel(guest.endpoint, shown=first.connections)
    await second.connect()
    with await second.take_listener() as taken:
        assert inode(taken) == inode(listener)
    second.close()


async def test_a_token_opens_one_thing_once(guest: Guest) -> None:
    """A process that read the token of a request can neither ask again nor become the daemon with it."""
    (await daemons_end.take_listener(guest.endpoint.socket_path, FIRST)).close()
    with pytest.raises(RefusedError):
        await daemons_end.take_listener(guest.endpoint.socket_path, FIRST)
    with pytest.raises(RefusedError):
        await GuestChannel(guest.endpoint).connect()
    channel = GuestChannel(guest.endpoint, shown=1)
    await channel.connect()
    shown = chained(TOKEN, CHAIN_LENGTH - 2).hex()
    with pytest.raises(RefusedError):
        await daemons_end.take_listener(guest.endpoint.socket_path, shown)
    channel.close()


@pytest.mark.parametrize("token", ["", "zz", bytes(32).hex(), FIRST[:-2], chained(TOKEN, CHAIN_LENGTH).hex()])
async def test_other_tokens_get_nothing(guest: Guest, token: str) -> None:
    with pytest.raises(RefusedError):
        await daemons_end.take_listener(guest.endpoint.socket_path, token)


async def test_a_daemon_of_another_version_gets_nothing(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons_end, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with pytest.raises(RefusedError):
        await daemons_end.take_listener(guest.endpoint.socket_path, FIRST)


async def test_a_guest_without_a_listener_refuses(tmp_path: Path) -> None:
    guest = Guest(tmp_path / "guest", None)
    channel = GuestChannel(guest.endpoint)
    await channel.connect()
    with pytest.raises(RefusedError, match="did not hand its listener out"):
        await channel.take_listener()
    assert channel.connected
    channel.close()
    await guest.close()


async def test_where_no_guest_listens_the_failure_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnreachedError, match="No such file"):
        await daemons_end.take_listener(tmp_path / "none", FIRST)


# -- hostile answers


async def answered(path: Path, answer: Callable[[socket.socket], None]) -> socket.socket:
    """Takes the listener from a guest that answers in its own way."""
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))
        own.listen(1)
        asking = asyncio.ensure_future(daemons_end.take_listener(path, FIRST))
        await asyncio.sleep(0)
        with own.accept()[0] as connection:
            assert connection.recv(4096)
            answer(connection)
            connection.shutdown(socket.SHUT_WR)
            return await asking


def send(connection: socket.socket, data: bytes, *fds: int) -> None:
    connection.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


SAID = {
    "nothing": (b"", "did not hand its listener out"),
    "an answer without a descriptor": (ANSWER, "0 descriptors"),
    "another frame": (encode_frame(Kind.ACK, {}), "something else"),
    "an answer to something else": (encode_frame(Kind.DONE, {"op": 1, "ok": True}), "something else"),
    "garbage": (b"HTTP/1.1 200 OK\r\n\r\n", "broke the protocol"),
    "an unknown kind": (encode_frame(200, {}), "broke the protocol"),
    "a huge frame": ((2**31).to_bytes(4, "big"), "broke the protocol"),
    "a frame without end": ((4096).to_bytes(4, "big") + bytes(2048), "something else"),
}


@pytest.mark.parametrize("what", SAID)
async def test_an_answer_that_is_none_is_refused(tmp_path: Path, listener: socket.socket, what: str) -> None:
    said, reason = SAID[what]
    with none_left_open(), pytest.raises(SandboxFailure, match=reason):
        await answered(tmp_path / "guest", lambda connection: send(connection, said) if said else None)


async def test_an_answer_in_pieces_is_an_answer(tmp_path: Path, listener: socket.socket) -> None:
    def answer(connection: socket.socket) -> None:
        send(connection, ANSWER[:5], listener.fileno())
        send(connection, ANSWER[5:])

    with none_left_open(), await answered(tmp_path / "guest", answer) as taken:
        assert inode(taken) == inode(listener)


async def test_a_silent_guest_is_given_up(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemons_end, "_ANSWER_TIME_S", 0.01)
    with socket.socket(socket.AF_UNIX) as own, none_left_open():
        own.bind(str(tmp_path / "guest"))
        own.listen(1)
        with pytest.raises(UnreachedError, match="within"):
            await daemons_end.take_listener(tmp_path / "guest", FIRST)


async def test_of_many_descriptors_none_is_kept(tmp_path: Path, listener: socket.socket) -> None:
    """The kernel passes the first at most; a second answer may bring another."""

    def at_once(connection: socket.socket) -> None:
        send(connection, ANSWER, *[listener.fileno()] * 200)

    def in_two_pieces(connection: socket.socket) -> None:
        send(connection, ANSWER[:5], listener.fileno())
        send(connection, ANSWER[5:], listener.fileno())

    with none_left_open():
        (await answered(tmp_path / "a", at_once)).close()
        with pytest.raises(SandboxFailure, match="2 descriptors"):
            await answered(tmp_path / "b", in_two_pieces)


def connected_pair() -> socket.socket:
    with made_listener() as listener:
        one = socket.create_connection(listener.getsockname())
        listener.accept()[0].close()
    return one


def lingering() -> socket.socket:
    one = connected_pair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    return one


def unix_listener() -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    one.bind("")  # an abstract name of the kernel's choice
    one.listen(1)
    return one


OTHERS: dict[str, Callable[[], socket.socket]] = {
    "a listener on another port": made_listener,
    "a listener on every address": lambda: made_listener("0.0.0.0"),
    "a listener of IPv6": lambda: socket.create_server(("::1", 0), family=socket.AF_INET6),
    "a Unix listener": unix_listener,
    "a socket that does not listen": socket.socket,
    "a connection": connected_pair,
    "a connection that lingers": lingering,
    "a datagram socket": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
}


@pytest.mark.parametrize("what", OTHERS)
async def test_another_socket_is_refused(tmp_path: Path, listener: socket.socket, what: str) -> None:
    with OTHERS[what]() as other, none_left_open(), pytest.raises(SandboxFailure, match="another socket"):
        await answered(tmp_path / "guest", lambda connection: send(connection, ANSWER, other.fileno()))


async def test_a_descriptor_of_no_socket_is_refused(tmp_path: Path, listener: socket.socket) -> None:
    refused = pytest.raises(SandboxFailure, match="something else than a socket")
    with (tmp_path / "file").open("wb") as file, none_left_open(), refused:
        await answered(tmp_path / "guest", lambda connection: send(connection, ANSWER, file.fileno()))
