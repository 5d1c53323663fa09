"""A command's streams are a transport like a socket's: bytes in order, or one end, whatever befalls the command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from executor_server.backends.e2b import patience
from executor_server.backends.e2b.failures import CloudFailure, Gone
from executor_server.backends.e2b.transport import CommandTransport, RelayEnded
from executor_server.guest.lines import LINE_BYTES, LineDecoder, encode_lines, start_line


class Relay:
    """The command's side: what the transport is told and what it does."""

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins
        self.taken: list[bytes] = []
        self.decoder = LineDecoder()
        self.stops = 0
        self.failures: list[CloudFailure] = []  # of the next requests, each after it was taken
        self.may_take = asyncio.Event()
        self.may_take.set()
        self.tried = asyncio.Event()
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._say: Callable[[str], Awaitable[None]] | None = None
        self._seq = 1

    async def start(self, nonce: str, say: Callable[[str], Awaitable[None]]) -> Relay:
        self._say = say
        if self.begins:
            self._greeting = asyncio.create_task(self._greet(nonce))
        return self

    async def _greet(self, nonce: str) -> None:
        await self.print("Welcome!\n")
        await self.print(start_line(nonce).decode())

    async def say(self, data: bytes) -> None:
        lines, self._seq = encode_lines(data, self._seq)
        await self.print(lines.decode())

    async def print(self, text: str) -> None:
        assert self._say is not None
        await self._say(text)

    def end(self, exit_code: int) -> None:
        self._end.set_result(exit_code)

    def stop_short(self) -> None:
        self._end.set_exception(CloudFailure("the stream stopped"))

    async def send(self, data: bytes) -> None:
        self.tried.set()
        await self.may_take.wait()
        self.taken += self.decoder.feed(data)
        if self.failures:
            raise self.failures.pop(0)

    async def ended(self) -> int:
        return await asyncio.shield(self._end)

    async def stop(self) -> None:
        self.stops += 1

    @property
    def received(self) -> bytes:
        return b"".join(self.taken)


class Taker(asyncio.Protocol):
    def __init__(self) -> None:
        self.data = b""
        self.ends: list[Exception | None] = []
        self.ended = asyncio.Event()
        self.paused: list[bool] = []
        self.connected = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connected = True

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)
        self.ended.set()

    def pause_writing(self) -> None:
        self.paused.append(True)

    def resume_writing(self) -> None:
        self.paused.append(False)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 1e-4)


async def opened(relay: Relay) -> tuple[CommandTransport, Taker]:
    taker = Taker()
    transport = CommandTransport(lambda _: None)
    await transport.open(relay.start, lambda: taker)
    return transport, taker


async def ended(transport: CommandTransport, taker: Taker) -> Exception | None:
    """The one end that the protocol is told of."""
    async with asyncio.timeout(5):
        await taker.ended.wait()
        await transport.finished()
    assert len(taker.ends) == 1
    return taker.ends[0]


async def test_what_a_login_shell_says_is_no_data() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    await relay.say(b"hello")
    assert taker.data == b"hello"
    transport.abort()
    await ended(transport, taker)


async def test_bytes_arrive_in_order_whatever_their_number() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    data = bytes(range(256)) * (5 * LINE_BYTES // 256) + b"rest"
    transport.write(data[:10])
    transport.write(data[10:])
    transport.close()
    assert await ended(transport, taker) is None
    assert relay.received == data


async def test_a_request_whose_answer_was_lost_is_repeated_and_counts_once() -> None:
    relay = Relay()
    relay.failures = [CloudFailure("no answer"), CloudFailure("no answer")]
    transport, taker = await opened(relay)
    transport.write(b"once")
    transport.close()
    await ended(transport, taker)
    assert relay.received == b"once"


async def test_input_that_can_not_be_sent_breaks_the_connection() -> None:
    relay = Relay()
    relay.failures = [CloudFailure("no answer")] * patience.ATTEMPTS
    transport, taker = await opened(relay)
    transport.write(b"lost")
    assert isinstance(await ended(transport, taker), ConnectionError)
    assert relay.stops == 1


async def test_a_command_that_is_gone_is_not_asked_again() -> None:
    relay = Relay()
    relay.failures = [Gone("no such command"), CloudFailure("not reached")]
    transport, taker = await opened(relay)
    transport.write(b"lost")
    assert isinstance(await ended(transport, taker), ConnectionError)
    assert len(relay.failures) == 1


async def test_the_guest_that_closes_its_socket_ends_the_connection_in_order() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    await relay.say(b"last words")
    relay.end(0)
    assert await ended(transport, taker) is None
    assert taker.data == b"last words"


@pytest.mark.parametrize("exit_code", [1, 2, 3, 4, 137])
async def test_any_other_end_of_the_relay_is_a_broken_connection(exit_code: int) -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    relay.end(exit_code)
    assert isinstance(await ended(transport, taker), ConnectionError)


async def test_a_stream_that_stops_without_an_end_is_a_broken_connection() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    relay.stop_short()
    assert isinstance(await ended(transport, taker), ConnectionError)


@pytest.mark.parametrize(
    "line", ["2 00000000 aGk=\n", "1 00000000 aGk=\n", "garbage\n", "x" * (2 * LINE_BYTES), "\u2028\n"]
)
async def test_a_line_that_is_not_the_next_one_breaks_the_connection(line: str) -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    await relay.print(line)
    await relay.say(b"too late")
    assert isinstance(await ended(transport, taker), ConnectionError)
    assert taker.data == b""


async def test_a_relay_that_ends_at_once_says_how() -> None:
    relay = Relay(begins=False)
    transport = CommandTransport(lambda _: None)
    relay.end(2)
    with pytest.raises(RelayEnded) as raised:
        await transport.open(relay.start, Taker)
    await transport.finished()
    assert raised.value.exit_code == 2


async def test_a_way_that_is_given_up_while_its_relay_starts_stops_it() -> None:
    relay = Relay()
    transport = CommandTransport(lambda _: None)

    async def start(nonce: str, say: Callable[[str], Awaitable[None]]) -> Relay:
        transport.abort()
        return await relay.start(nonce, say)

    with pytest.raises(CloudFailure):
        await transport.open(start, Taker)
    await transport.finished()
    assert relay.stops == 1


async def test_a_relay_that_ends_as_soon_as_it_is_there_is_handed_to_nobody() -> None:
    relay = Relay(begins=False)
    transport, taker = CommandTransport(lambda _: None), Taker()

    async def start(nonce: str, say: Callable[[str], Awaitable[None]]) -> Relay:
        await relay.start(nonce, say)
        await relay.print(start_line(nonce).decode())
        transport.abort()  # as at the end of its stream
        return relay

    with pytest.raises(CloudFailure):
        await transport.open(start, lambda: taker)
    await transport.finished()
    assert not taker.connected
    assert relay.stops == 1


async def test_one_that_says_something_else_is_given_up() -> None:
    relay = Relay(begins=False)
    transport = CommandTransport(lambda _: None)
    opening = asyncio.create_task(transport.open(relay.start, Taker))
    await asyncio.sleep(0)
    for _ in range(20):
        await relay.print("Press any key to continue. " * 200)
    with pytest.raises(CloudFailure):
        await opening
    await transport.finished()
    assert relay.stops == 1


async def test_an_opening_that_is_cancelled_stops_its_relay() -> None:
    relay = Relay(begins=False)
    finished = asyncio.Event()
    transport = CommandTransport(lambda _: finished.set())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await transport.open(relay.start, Taker)
    async with asyncio.timeout(5):
        await finished.wait()
    assert relay.stops == 1


async def test_who_pauses_reading_holds_the_output_back() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    transport.pause_reading()
    assert not transport.is_reading()
    saying = asyncio.create_task(relay.say(b"more"))
    await asyncio.sleep(0)
    assert not saying.done()
    assert taker.data == b""
    transport.resume_reading()
    await saying
    assert taker.data == b"more"
    transport.abort()
    await ended(transport, taker)


async def test_output_that_is_held_back_goes_when_the_connection_does() -> None:
    """The SDK's task must not wait for ever in the callback."""
    relay = Relay()
    transport, taker = await opened(relay)
    transport.pause_reading()
    saying = asyncio.create_task(relay.say(b"more"))
    await asyncio.sleep(0)
    transport.abort()
    async with asyncio.timeout(5):
        await saying
    await ended(transport, taker)
    assert taker.data == b""


async def test_a_writer_is_held_back_and_let_go_on() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    transport.set_write_buffer_limits(high=100)
    relay.may_take.clear()
    transport.write(b"x" * 100)
    assert taker.paused == []
    transport.write(b"x")
    assert taker.paused == [True]
    assert transport.get_write_buffer_size() == 101
    relay.may_take.set()
    transport.write(b"x")
    transport.close()
    await ended(transport, taker)
    assert taker.paused == [True, False]
    assert len(relay.received) == 102


async def test_what_is_being_sent_counts_as_written_and_not_sent() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    relay.may_take.clear()
    transport.write(b"x" * 10)
    await relay.tried.wait()
    assert transport.get_write_buffer_size() == 10
    transport.abort()
    await ended(transport, taker)


async def test_nothing_is_written_after_the_end() -> None:
    relay = Relay()
    transport, taker = await opened(relay)
    transport.close()
    transport.write(b"late")
    assert transport.is_closing()
    await ended(transport, taker)
    transport.abort()
    assert relay.received == b""
    assert relay.stops == 1


async def test_a_relay_that_can_not_be_stopped_does_not_hold_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay()
    transport, taker = await opened(relay)

    async def refuse() -> None:
        raise CloudFailure("not reached")

    monkeypatch.setattr(relay, "stop", refuse)
    transport.abort()
    assert await ended(transport, taker) is None
