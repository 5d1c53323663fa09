"""The link between daemon and proxy: lines in order, a descriptor with the message that it belongs to, and bounds."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from executor_server.network.proxy import Link

SOON_S = 20.0


@dataclass
class End:
    """One end of a link, and what came to it."""

    link: Link = field(init=False)
    messages: list[dict[str, Any]] = field(default_factory=list)
    descriptors: list[int | None] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, message: dict[str, Any], descriptor: int | None) -> None:
        self.messages.append(message)
        self.descriptors.append(descriptor)
        self.news.set()

    def end(self, why: str) -> None:
        self.ends.append(why)
        self.news.set()

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def _end(sock: socket.socket, *, takes: bool = True, max_line: int = 1000, max_backlog: int = 10**7) -> End:
    end = End()
    end.link = Link(
        sock,
        max_line_bytes=max_line,
        max_backlog_bytes=max_backlog,
        takes_descriptors=takes,
        on_message=end.take,
        on_end=end.end,
    )
    return end


async def test_messages_and_descriptors_arrive_together_and_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = _end(pair[0]), _end(pair[1], max_line=10**6)
    with contextlib.ExitStack() as stack:
        pipes = [os.pipe() for _ in range(8)]
        for each in pipes:
            stack.callback(os.close, each[0])
            stack.callback(os.close, each[1])
        for number, (_, write) in enumerate(pipes):
            ours.link.send({"type": "plain", "number": number, "fill": "x" * 50_000})
            ours.link.send({"type": "with", "number": number}, write)
        await theirs.until(lambda: len(theirs.messages) == 16)
        assert [message["type"] for message in theirs.messages] == ["plain", "with"] * 8
        for number, (read, _) in enumerate(pipes):
            descriptor = theirs.descriptors[2 * number + 1]
            assert theirs.descriptors[2 * number] is None
            assert descriptor is not None
            assert not os.get_inheritable(descriptor)
            os.write(descriptor, b"%d" % number)
            assert os.read(read, 10) == b"%d" % number
            os.close(descriptor)
    ours.link.close()
    theirs.link.close()


async def test_callers_descriptor_may_be_closed_while_its_message_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Its number may by then belong to something else, which must not be handed to the proxy."""
    ours = _end(pair[0])
    ours.link.send({"type": "fill", "fill": "x" * 1_000_000})  # more than the socket takes
    read, write = os.pipe()
    ours.link.send({"type": "with"}, write)
    os.close(write)
    theirs = _end(pair[1], max_line=2_000_000)
    await theirs.until(lambda: len(theirs.messages) == 2)
    descriptor = theirs.descriptors[1]
    assert descriptor is not None
    os.write(descriptor, b"same pipe")
    assert os.read(read, 20) == b"same pipe"
    os.close(descriptor)
    os.close(read)
    ours.link.close()
    theirs.link.close()


async def test_line_that_is_too_long_ends_the_link(pair: tuple[socket.socket, socket.socket]) -> None:
    theirs = _end(pair[1], max_line=100)
    pair[0].sendall(b"x" * 101)
    await theirs.until(lambda: theirs.ends)
    assert theirs.ends == ["a line is longer than 100 bytes"]
    assert theirs.messages == []


@pytest.mark.parametrize("line", [b"nonsense\n", b"{}\n", b'{"type": "bind", "descriptor": true}\n'])
async def test_line_that_breaks_the_protocol_ends_the_link(
    pair: tuple[socket.socket, socket.socket], line: bytes
) -> None:
    theirs = _end(pair[1])
    pair[0].sendall(line)
    await theirs.until(lambda: theirs.ends)
    assert theirs.messages == []


async def test_descriptors_that_were_not_asked_for_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    """A proxy that was taken over can't leave descriptors in the daemon, which reads without room for any."""
    ours = _end(pair[0], takes=False)
    before = _descriptors()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 100))]
    for _ in range(20):
        pair[1].sendmsg([b'{"type": "x"}\n'], rights)
    await ours.until(lambda: len(ours.messages) == 20)
    assert _descriptors() == before
    ours.link.close()


async def test_end_of_the_other_side_is_reported_once(pair: tuple[socket.socket, socket.socket]) -> None:
    ours = _end(pair[0])
    pair[1].close()
    await ours.until(lambda: ours.ends)
    ours.link.send({"type": "late"})
    ours.link.close()
    assert ours.ends == ["it closed the link"]


async def test_end_that_does_not_read_is_given_up_with_all_that_waits(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours = _end(pair[0], max_backlog=2_000_000)
    before = _descriptors()
    while not ours.ends:
        ours.link.send({"type": "fill", "fill": "x" * 100_000}, pair[0].fileno())
    assert ours.ends == ["it does not read what it is sent"]
    assert _descriptors() < before  # without the link's own


async def test_close_is_silent(pair: tuple[socket.socket, socket.socket]) -> None:
    ours = _end(pair[0])
    ours.link.close()
    ours.link.close()
    assert ours.ends == []
