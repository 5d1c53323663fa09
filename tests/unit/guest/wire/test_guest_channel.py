"""Both ends of the channel against each other, in one event loop: every frame once and in order, whatever breaks."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from executor_server.backends.channel.daemon_channel import GuestChannel
from executor_server.backends.channel.endpoint import SocketEndpoint
from executor_server.core.errors import SandboxFailure
from executor_server.guest.wire.frames import CHUNK_BYTES, PROTOCOL_VERSION, Frame, FrameError, Kind, encode_frame
from executor_server.guest.wire.guest_channel import Channel, FileSlice
from executor_server.guest.wire.link import sealed_memfd
from executor_server.guest.wire.loop import Loop
from executor_server.guest.wire.messages import Image, Ready
from executor_server.guest.wire.schema import Message, Record
from executor_server.guest.wire.sequenced import KEPT_BYTES
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained
from tests.support.descriptors import none_left_open
from tests.support.polling import eventually_async

TOKEN = bytes(range(32))
SHOWN = chained(TOKEN, CHAIN_LENGTH - 1)
IMAGE = Image(id="e", mime="image/png", source="figure")
READY = {"protocol": PROTOCOL_VERSION, "python": "3.11.0", "generation": 1}


def raw(kind: int, head: dict[str, Any]) -> Message:
    """A message of this kind with any head at all, as no correct peer sends it."""
    made = type("Raw", (Record,), {"kind": kind})()
    made.__dict__.update(head)
    return cast("Message", made)


class Both:
    """The guest's end, turned by the event loop that the daemon's ends run in."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "guest"
        self.ready: dict[str, Any] = dict(READY)
        self.heard: list[tuple[int, Any, bytes]] = []  # frames that the guest got
        self.refused = 0  # so many frames are not the guest's
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._turning = Loop()
        self.daemons_greeted = 0
        self.guest = Channel(
            *(self._listener, chained(TOKEN, CHAIN_LENGTH).hex(), self._turning, self._on_frame, self._describe),
            on_new_daemon=self._on_new_daemon,
        )
        self._ends: list[GuestChannel] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._turning._poll.fileno(), self._turning.turn, 0)

    def _on_new_daemon(self) -> None:
        self.daemons_greeted += 1

    def _describe(self, last_seq: int, acked: int) -> Ready:
        return cast("Ready", raw(Kind.READY, {**self.ready, "last_seq": last_seq, "acked": acked}))

    def say(self, kind: int, head: dict[str, Any], body: bytes | FileSlice = b"") -> None:
        """Has the guest send anything at all."""
        self.guest.send(raw(kind, head), body)

    def _on_frame(self, frame: Frame) -> None:
        if self.refused:
            self.refused -= 1
            raise FrameError("not for a guest")
        self.heard.append((frame.kind, frame.head.values, frame.body))

    def daemon(self, token: bytes = TOKEN, *, shown: int = 0, daemon_id: str = "a") -> End:
        end = End(SocketEndpoint(self.path, token), shown, daemon_id)
        self._ends.append(end.channel)
        return end

    async def stranger(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(data)
        return reader, writer

    def settle(self) -> None:
        """Releases the guest's kept frames, as if every one had been acknowledged."""
        self.guest._window.acknowledge(self.guest._window.sent)

    async def close(self) -> None:
        for end in self._ends:
            end.close()
        await eventually_async(lambda: not any(end.connected for end in self._ends))
        await eventually_async(lambda: not self.guest.connected)
        self._loop.remove_reader(self._turning._poll.fileno())
        self.guest.close_all()
        self._turning.close()


class End:
    """A daemon's end, and what it got."""

    def __init__(self, endpoint: SocketEndpoint, shown: int, daemon_id: str) -> None:
        self.channel = GuestChannel(endpoint, shown=shown, daemon_id=daemon_id)
        self.channel.on_frame = self._on_frame
        self.channel.on_lost = self._on_lost
        self.frames: list[tuple[int, Any, bytes]] = []
        self.lost: list[str] = []
        self.break_at: set[int] = set()

    def _on_frame(self, frame: Frame) -> None:
        self.frames.append((frame.kind, frame.head.values, frame.body))
        if len(self.frames) in self.break_at:
            self.break_off()

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)

    def say(self, kind: int, head: dict[str, Any], body: bytes = b"") -> None:
        """Sends anything at all."""
        self.channel.send(raw(kind, head), body)

    def break_off(self) -> None:
        """As when the connection breaks of itself."""
        assert self.channel._transport is not None
        self.channel._transport.abort()

    async def got(self, count: int) -> bool:
        return bool(await eventually_async(lambda: len(self.frames) >= count))


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    both = Both(tmp_path)
    yield both
    await both.close()


def log(number: int) -> tuple[int, dict[str, Any], bytes]:
    return Kind.LOG, {"id": "e", "stream": "stdout"}, b"%d" % number


async def test_frames_go_both_ways_in_order(both: Both) -> None:
    end = both.daemon()
    info = await end.channel.connect()
    assert (info.python_version, info.generation) == ("3.11.0", 1)
    large = os.urandom(CHUNK_BYTES)
    end.say(Kind.EXECUTE, {"id": "e"}, b"1")
    end.say(Kind.BLOB_DATA, {"blob": "b"}, large)
    for number in range(5):
        both.say(*log(number))
    assert await end.got(5)
    assert await eventually_async(lambda: len(both.heard) == 2)
    assert end.frames == [log(number) for number in range(5)]
    assert both.heard == [(Kind.EXECUTE, {"id": "e"}, b"1"), (Kind.BLOB_DATA, {"blob": "b"}, large)]


@pytest.mark.parametrize("seed", range(8))
async def test_each_frame_comes_once_and_in_order_wherever_the_channel_breaks(both: Both, seed: int) -> None:
    chance = random.Random(seed)
    end = both.daemon()
    expected = []
    end.break_at = {chance.randrange(1, 60) for _ in range(6)}
    await end.channel.connect()
    for number in range(60):
        head = {"id": "e", "blob": f"g{number}"}
        body = chance.randbytes(chance.choice([0, 1, 100, 70_000, CHUNK_BYTES]))
        if chance.random() < 0.4 and body:
            both.say(Kind.BLOB_CHUNK, head, FileSlice(sealed_memfd([body]), 0, len(body), last=True))
        else:
            both.say(Kind.BLOB_CHUNK, head, body)
        expected.append((Kind.BLOB_CHUNK, head, body))
        if chance.random() < 0.1:
            both.guest._disconnect()  # within a frame, as often as not
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        if not end.channel.connected and chance.random() < 0.7:
            await end.channel.connect()
    for _ in range(20):
        if not end.channel.connected:
            await end.channel.connect()
        if await eventually_async(lambda: len(end.frames) == 60 or not end.channel.connected) and len(end.frames) == 60:
            break
    assert end.frames == expected
    end.say(Kind.ACK, {}) if end.channel.connected else await end.channel.connect()
    assert await eventually_async(lambda: both.guest._window.settled)


async def test_a_memory_file_goes_out_in_chunks_and_is_closed_once_it_was_taken(both: Both) -> None:
    data = os.urandom(3 * CHUNK_BYTES + 5)
    with none_left_open():
        fd = sealed_memfd([data])
        both.guest.send_payload(IMAGE, fd, len(data))
        end = both.daemon()
        await end.channel.connect()
        assert await end.got(5)
        assert b"".join(body for _, _, body in end.frames) == data
        assert end.frames[-1] == (Kind.IMAGE, {**IMAGE.head(), "blob": "g1", "size": len(data)}, b"")
        assert {head["blob"] for _, head, _ in end.frames} == {"g1"}
        end.say(Kind.ACK, {})
        assert await eventually_async(lambda: both.guest._window.settled)
        end.channel.close()
        assert await eventually_async(lambda: not both.guest.connected)


async def test_an_empty_memory_file_is_an_empty_payload(both: Both) -> None:
    """Agent code can send one in place of an image, and it must not end the supervisor."""
    end = both.daemon()
    await end.channel.connect()
    with none_left_open():
        both.guest.send_payload(IMAGE, sealed_memfd([]), 0)
        both.guest.send_memfd(IMAGE, sealed_memfd([]), 0)
        assert await end.got(1)
        end.say(Kind.ACK, {})
        assert await eventually_async(lambda: both.guest._window.settled)
    assert end.frames == [(Kind.IMAGE, IMAGE.head(), b"")]


async def test_a_later_daemon_gets_what_an_earlier_one_did_not_acknowledge(both: Both) -> None:
    for number in range(3):
        both.say(*log(number))
    first = both.daemon()
    await first.channel.connect()
    assert await first.got(3)
    first.channel.close()
    second = both.daemon(shown=1)
    await second.channel.connect()
    assert await second.got(3)
    assert second.frames == first.frames


async def test_a_later_daemon_goes_on_after_what_was_acknowledged_and_it_does_not_remember(both: Both) -> None:
    """Not all that has a number is worth writing down; what an earlier daemon acknowledged is gone."""
    first = both.daemon()
    await first.channel.connect()
    for number in range(3):
        both.say(*log(number))
    assert await first.got(3)
    first.say(Kind.CANCEL, {"id": "e"})
    assert await eventually_async(lambda: both.guest._window.settled)
    both.say(*log(3))
    assert await first.got(4)
    first.channel.close()
    second = both.daemon(shown=1, daemon_id="b")
    second.channel.go_on_after(1)
    await second.channel.connect()
    both.say(*log(4))
    assert await second.got(2)
    assert second.frames == [log(3), log(4)]
    assert second.channel.sent_seq == 1, "its own numbers go on after those of the first"


async def test_another_daemon_is_told_from_one_that_connects_again(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    end.break_off()
    assert await eventually_async(lambda: not end.channel.connected)
    await end.channel.connect()
    assert both.daemons_greeted == 1
    await both.daemon(shown=2, daemon_id="b").channel.connect()
    assert both.daemons_greeted == 2


async def test_what_was_sent_is_delivered_once_the_guest_says_so(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    for number in range(10):
        end.say(Kind.BLOB_DATA, {"blob": "b"}, bytes(CHUNK_BYTES))
        if number == 5:
            end.break_off()
            assert await eventually_async(lambda: not end.channel.connected)
    delivered = asyncio.create_task(end.channel.delivered())
    await asyncio.sleep(0)
    assert not delivered.done()
    await end.channel.connect()
    await delivered
    assert len(both.heard) == 10
    end.say(Kind.CANCEL, {"id": "e"})
    end.channel.close()
    await end.channel.delivered()


async def test_each_numbered_frame_is_shown_before_it_leaves(both: Both) -> None:
    end = both.daemon()
    shown: list[tuple[int, int, bytes]] = []
    end.channel.on_send = lambda kind, seq, _prefix, body: shown.append((kind, seq, body))
    await end.channel.connect()
    end.channel.ping()
    end.say(Kind.EXECUTE, {"id": "e"}, b"1")
    assert shown == [(Kind.EXECUTE, 1, b"1")]
    assert both.heard == []


async def test_the_newest_connection_with_the_token_wins(both: Both) -> None:
    first, second = both.daemon(), both.daemon(shown=1)
    await first.channel.connect()
    await second.channel.connect()
    assert await eventually_async(lambda: first.lost)
    both.say(*log(1))
    assert await second.got(1)
    assert second.channel.connected


async def test_a_daemon_that_says_what_is_not_a_guest_s_ends_the_sandbox(both: Both) -> None:
    """Going on would leave a caller waiting for what was refused."""
    end = both.daemon()
    await end.channel.connect()
    both.refused = 1
    end.say(Kind.EXECUTE, {})
    assert await eventually_async(lambda: both.guest.broken)


async def test_a_token_opens_once(both: Both) -> None:
    first = both.daemon()
    await first.channel.connect()
    with pytest.raises(SandboxFailure):
        await both.daemon().channel.connect()
    assert first.channel.connected
    await both.daemon(shown=CHAIN_LENGTH // 32).channel.connect()


async def test_pings_are_answered_between_frames_that_wait(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    end.channel.reading.pause()
    for _ in range(20):
        both.say(Kind.BLOB_CHUNK, {"id": "e", "blob": "g"}, bytes(CHUNK_BYTES))
    before_s = end.channel.last_heard_s
    end.say(Kind.PING, {})
    for _ in range(20):
        await asyncio.sleep(0)
    end.channel.reading.resume()
    assert await end.got(20)
    assert end.channel.last_heard_s > before_s
    assert not end.lost


# -- back-pressure


async def test_the_guest_is_full_until_the_daemon_has_taken_enough(both: Both) -> None:
    count = KEPT_BYTES // CHUNK_BYTES + 2
    end = both.daemon()
    await end.channel.connect()
    end.channel.reading.pause()
    for _ in range(count):
        both.say(Kind.BLOB_CHUNK, {"id": "e", "blob": "g"}, bytes(CHUNK_BYTES))
    assert both.guest.full
    end.channel.reading.resume()
    assert await end.got(count)
    assert await eventually_async(lambda: not both.guest.full), "the daemon acknowledges by itself"


async def test_a_channel_that_rests_goes_on_only_when_its_owner_wants_that_too(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    end.channel.reading.rest()
    end.channel.reading.pause()
    both.say(Kind.BLOB_CHUNK, {"id": "e", "blob": "g"}, b"x")
    end.channel.reading.go_on()
    assert not await eventually_async(lambda: end.frames, timeout_s=0.1)
    end.channel.reading.resume()
    assert await end.got(1)


async def test_a_channel_that_is_held_can_be_connected_again(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    end.channel.reading.pause()
    end.break_off()
    assert await eventually_async(lambda: not end.channel.connected)
    await end.channel.connect()
    end.channel.reading.resume()
    both.say(Kind.BLOB_CHUNK, {"id": "e", "blob": "g"}, b"x")
    assert await end.got(1)


async def test_a_daemon_that_sends_much_waits_for_the_guest(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    for _ in range(64):
        end.say(Kind.BLOB_DATA, {"blob": "b"}, bytes(CHUNK_BYTES))
    drained = asyncio.create_task(end.channel.drain())
    await asyncio.sleep(0)
    assert not drained.done()
    await drained
    assert await eventually_async(lambda: len(both.heard) == 64)


async def test_nobody_waits_for_room_in_a_channel_that_is_closed(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    for _ in range(64):
        end.say(Kind.BLOB_DATA, {"blob": "b"}, bytes(CHUNK_BYTES))
    end.channel.close()
    await asyncio.wait_for(end.channel.drain(), 10.0)


# -- who may not


async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Returns True when the guest hangs up without a word."""
    try:
        said = await asyncio.wait_for(reader.read(), 10.0)
    except ConnectionResetError:
        said = b""
    writer.close()
    return said == b""


def hello(**fields: Any) -> bytes:
    greeting = {"token": SHOWN.hex(), "protocol": PROTOCOL_VERSION, "daemon": "a", "last_seq": 0}
    return encode_frame(Kind.HELLO, {**greeting, **fields})


STRANGERS = {
    "the wrong token": hello(token=bytes(32).hex()),
    "the token in part": hello(token=SHOWN.hex()[:-2]),
    "no token": encode_frame(Kind.HELLO, {}),
    "a token that is no text": hello(token=7),
    "a token that is not hexadecimal": hello(token="zz"),
    "another frame with the token": encode_frame(Kind.EXECUTE, {"token": SHOWN.hex()}),
    "garbage": b"GET / HTTP/1.1\r\n\r\n",
    "another version": hello(protocol=PROTOCOL_VERSION + 1),
    "no version": hello(protocol=None),
    "no name": hello(daemon=None),
    "a position that was never reached": hello(last_seq=1),
}


@pytest.mark.parametrize("what", STRANGERS)
async def test_who_cannot_greet_is_hung_up_on_and_the_daemon_keeps_its_channel(both: Both, what: str) -> None:
    end = both.daemon()
    await end.channel.connect()
    assert await gone(*await both.stranger(STRANGERS[what]))
    both.say(*log(1))
    assert await end.got(1)


async def test_strangers_are_few_the_oldest_goes_first_and_the_daemon_gets_in(both: Both) -> None:
    with none_left_open():
        strangers = [await both.stranger(hello()[:10]) for _ in range(4)]
        assert await eventually_async(lambda: len(both.guest._strangers) == 4)
        strangers.append(await both.stranger())
        assert await gone(*strangers.pop(0))
        end = both.daemon()
        await end.channel.connect()
        assert await gone(*strangers.pop(0)), "the daemon is a stranger until it has greeted"
        assert len(both.guest._strangers) == 3
        both.guest.expire_strangers()
        assert len(both.guest._strangers) == 3, "they have their time"
        for stranger in both.guest._strangers.values():
            stranger.deadline = 0.0
        both.guest.expire_strangers()
        for stranger_ends in strangers:
            assert await gone(*stranger_ends)
        end.channel.close()
        assert await eventually_async(lambda: not both.guest.connected)


async def test_a_greeting_in_pieces_is_a_greeting(both: Both) -> None:
    data = hello()
    reader, writer = await both.stranger(data[:1])
    for byte in data[1:]:
        await asyncio.sleep(0)
        writer.write(bytes([byte]))
    assert await reader.readexactly(4)
    assert both.guest.connected
    writer.close()


# -- the daemon's end


@pytest.mark.parametrize(
    "ready",
    [{**READY, "protocol": PROTOCOL_VERSION + 1}, {**READY, "generation": 0}, {**READY, "python": 3}, {}],
)
async def test_a_guest_that_is_not_ours_is_not_taken(both: Both, ready: dict[str, Any]) -> None:
    both.ready = ready
    end = both.daemon()
    with pytest.raises(SandboxFailure, match="protocol"):
        await end.channel.connect()
    with pytest.raises(SandboxFailure, match="closed"):
        await end.channel.connect()
    assert not end.lost


async def test_nobody_there_is_a_failure_within_its_time(tmp_path: Path) -> None:
    channel = GuestChannel(SocketEndpoint(tmp_path / "nobody", TOKEN))
    with pytest.raises(SandboxFailure, match="not ready within"):
        await channel.connect(0.02)


async def test_a_closed_channel_says_nothing_more(both: Both) -> None:
    end = both.daemon()
    await end.channel.connect()
    end.channel.close()
    end.channel.close()
    assert await eventually_async(lambda: not both.guest.connected)
    end.say(Kind.PING, {})
    end.channel.reading.pause()
    end.channel.reading.resume()
    assert not end.lost
