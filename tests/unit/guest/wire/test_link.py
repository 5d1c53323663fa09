"""Messages between supervisor and children: what is not sealed, whole and expected is refused, and closed."""

from __future__ import annotations

import array
import os
import socket
import tempfile
from collections.abc import Callable, Iterator

import pytest

from executor_server.guest.wire import link
from executor_server.guest.wire.frames import FrameError
from executor_server.guest.wire.link_messages import Booted, Variable, message_of
from tests.support.descriptors import none_left_open

MAX_BYTES = 1_000_000
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with none_left_open():
        ours, theirs = link.make_pair()
        yield ours, theirs
        ours.close()
        theirs.close()


def send_raw(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])


def packed(head: bytes, body: bytes = b"") -> bytes:
    return len(head).to_bytes(4, "big") + head + body


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("size", [0, 1, link.INLINE_BYTES, link.INLINE_BYTES + 1, MAX_BYTES])
def test_a_body_of_any_size_comes_whole(pair: Pair, size: int, in_parts: bool) -> None:
    body = os.urandom(size)
    # A view of items that are no bytes: its length is not its size.
    items = memoryview(array.array("d", body[1 : 1 + (size - 1) // 8 * 8] if size else b""))
    link.send(pair[0], Variable(name="x"), [body[:1], items, body[1 + items.nbytes :]] if in_parts else body)
    packet = link.receive(pair[1], MAX_BYTES)
    assert (message_of(packet), packet.size) == (Variable(name="x"), size)
    assert (packet.memfd is not None) == (size > link.INLINE_BYTES)
    assert (packet.body if packet.memfd is None else link.read_memfd(packet.memfd, packet.size)) == body


def test_descriptors_come_along_and_stay_the_sender_s(pair: Pair) -> None:
    read_fd, write_fd = os.pipe()
    link.send(pair[0], Booted(), bytes(link.INLINE_BYTES + 1), (read_fd, write_fd))
    packet = link.receive(pair[1], MAX_BYTES)
    assert packet.memfd is not None
    assert len(packet.fds) == 2
    os.write(packet.fds[1], b"x")
    assert os.read(read_fd, 1) == b"x"
    for fd in (packet.memfd, *packet.fds, read_fd, write_fd):
        os.close(fd)


def test_a_forwarded_memory_file_stays_the_sender_s(pair: Pair) -> None:
    memfd = link.sealed_memfd([b"one", b"two"])
    link.forward(pair[0], Booted(), memfd)
    packet = link.receive(pair[1], MAX_BYTES)
    assert packet.memfd is not None
    assert link.read_memfd(packet.memfd, packet.size) == link.read_memfd(memfd, 6) == b"onetwo"


def test_messages_keep_their_boundaries(pair: Pair) -> None:
    for number in range(5):
        link.send(pair[0], Booted(), b"x" * number)
    assert [link.receive(pair[1], MAX_BYTES).body for _ in range(5)] == [b"x" * number for number in range(5)]


def unsealed() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, b"x")
    return fd


def half_sealed() -> int:
    import fcntl

    fd = unsealed()
    fcntl.fcntl(fd, 1033, 0x2 | 0x4)  # shrink and grow, but not write
    return fd


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def pipe_end() -> int:
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    return read_fd


def too_large() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, MAX_BYTES + 1)
    link.seal(fd)
    return fd


@pytest.mark.parametrize("make", [unsealed, half_sealed, plain_file, pipe_end, too_large])
def test_only_a_sealed_memory_file_within_the_limit_is_a_payload(pair: Pair, make: Callable[[], int]) -> None:
    """Anything else could change while it is read, or block the reader."""
    fd = make()
    link.forward(pair[0], Booted(), fd)
    os.close(fd)
    with pytest.raises(FrameError):
        link.receive(pair[1], MAX_BYTES)


BAD_MESSAGES = {
    "no length": b"abc",
    "a head past the end": packed(b"{}")[:5],
    "a head of 4 GB": b"\xff\xff\xff\xff{}",
    "a head that is not JSON": packed(b"{"),
    "a head that is a list": packed(b"[]"),
    "a payload that is not there": packed(b'{"memfd":true}'),
}


@pytest.mark.parametrize("what", BAD_MESSAGES)
def test_a_bad_message_is_refused_and_what_came_along_is_closed(pair: Pair, what: str) -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    fds = [] if "not there" in what else [devnull, devnull, devnull]
    send_raw(pair[0], BAD_MESSAGES[what], fds)
    os.close(devnull)
    with pytest.raises(FrameError):
        link.receive(pair[1], MAX_BYTES)


def test_a_packet_that_is_too_long_or_has_too_many_descriptors_is_refused(pair: Pair) -> None:
    devnull = os.open(os.devnull, os.O_RDONLY)
    send_raw(pair[0], packed(b"{}", bytes(200_000)), [devnull])
    send_raw(pair[0], packed(b"{}"), [devnull] * 100)
    os.close(devnull)
    for _ in range(2):
        with pytest.raises(FrameError, match="truncated"):
            link.receive(pair[1], MAX_BYTES)


def test_an_empty_packet_and_a_closed_end_are_the_end(pair: Pair) -> None:
    pair[0].send(b"")
    with pytest.raises(link.LinkClosed):
        link.receive(pair[1], MAX_BYTES)
    pair[0].close()
    with pytest.raises(link.LinkClosed):
        link.receive(pair[1], MAX_BYTES)
    for body in (b"", bytes(link.INLINE_BYTES + 1)):
        with pytest.raises(link.LinkClosed):
            link.send(pair[1], Booted(), body)


def test_a_link_that_is_full_or_empty_does_not_block(pair: Pair) -> None:
    for end in pair:
        end.setblocking(False)
    with pytest.raises(BlockingIOError):
        link.receive(pair[1], MAX_BYTES)
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            link.send(pair[0], Booted(), bytes(link.INLINE_BYTES))
            sent += 1
    assert sent >= 1, "a full packet has room"
