"""A command's streams are a transport like a socket's: bytes in order, or one end, however the command fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from executor_server.backends.e2b import retry
from executor_server.backends.e2b.failures import CloudFailure, Missing
from executor_server.backends.e2b.transport import CommandTransport, RelayEnded
from executor_server.guest.wire.lines import LINE_BYTES, LineDecoder, encode_lines, start_line


class Relay:
    """The command's side: it records the transport's requests, and prints and ends as the test asks."""

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins
        self.taken: list[bytes] = []
        self.decoder = LineDecoder()
        self.stops = 0
        self.failures: list[CloudFailure] = []  # raised by the next requests, each after it was received
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


class Receiver(asyncio.Protocol):
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
    monkeypatch.setattr(retry, "_FIRST_PAUSE_S", 1e-4)


async def opened(relay: Relay) -> tuple[CommandTransport, Receiver]:
    receiver = Receiver()
    transport = CommandTransport(lambda _: None)
    await transport.open(relay.start, lambda: receiver)
    return transport, receiver


async def ended(transport: CommandTransport, receiver: Receiver) -> Exception | None:
    """Returns the error of the one `connection_lost`."""
    async with asyncio.timeout(5):
        await receiver.ended.wait()
        await transport.finished()
    assert len(receiver.ends) == 1
    return receiver.ends[0]


async def test_the_greeting_of_a_login_shell_is_no_data() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    await relay.say(b"hello")
    assert receiver.data == b"hello"
    transport.abort()
    await ended(transport, receiver)


async def test_any_number_of_bytes_arrives_in_order() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    data = bytes(range(256)) * (5 * LINE_BYTES // 256) + b"rest"
    transport.write(data[:10])
    transport.write(data[10:])
    transport.close()
    assert await ended(transport, receiver) is None
    assert relay.received == data


async def test_a_request_whose_answer_was_lost_is_repeated_and_counts_once() -> None:
    relay = Relay()
    relay.failures = [CloudFailure("no answer"), CloudFailure("no answer")]
    transport, receiver = await opened(relay)
    transport.write(b"once")
    transport.close()
    await ended(transport, receiver)
    assert relay.received == b"once"


async def test_input_that_cannot_be_sent_breaks_the_connection() -> None:
    relay = Relay()
    relay.failures = [CloudFailure("no answer")] * retry.ATTEMPTS
    transport, receiver = await opened(relay)
    transport.write(b"lost")
    assert isinstance(await ended(transport, receiver), ConnectionError)
    assert relay.stops == 1


async def test_a_missing_command_gets_no_further_request() -> None:
    relay = Relay()
    relay.failures = [Missing("no such command"), CloudFailure("not reached")]
    transport, receiver = await opened(relay)
    transport.write(b"lost")
    assert isinstance(await ended(transport, receiver), ConnectionError)
    assert len(relay.failures) == 1


async def test_the_guest_that_closes_its_socket_ends_the_connection_in_order() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    await relay.say(b"last words")
    relay.end(0)
    assert await ended(transport, receiver) is None
    assert receiver.data == b"last words"


@pytest.mark.parametrize("exit_code", [1, 137])
async def test_any_other_end_of_the_relay_is_a_broken_connection(exit_code: int) -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    relay.end(exit_code)
    assert isinstance(await ended(transport, receiver), ConnectionError)


async def test_a_stream_that_stops_without_an_end_is_a_broken_connection() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    relay.stop_short()
    assert isinstance(await ended(transport, receiver), ConnectionError)


@pytest.mark.parametrize(
    "line", ["2 00000000 aGk=\n", "1 00000000 aGk=\n", "garbage\n", "x" * (2 * LINE_BYTES), "\u2028\n"]
)
async def test_a_line_that_is_not_the_next_one_breaks_the_connection(line: str) -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    await relay.print(line)
    await relay.say(b"too late")
    assert isinstance(await ended(transport, receiver), ConnectionError)
    assert receiver.data == b""


async def test_a_relay_that_ends_at_once_says_how() -> None:
    relay = Relay(begins=False)
    transport = CommandTransport(lambda _: None)
    relay.end(2)
    with pytest.raises(RelayEnded) as raised:
        await transport.open(relay.start, Receiver)
    await transport.finished()
    assert raised.value.exit_code == 2


async def test_a_connection_that_is_aborted_while_its_relay_starts_stops_it() -> None:
    relay = Relay()
    transport = CommandTransport(lambda _: None)

    async def start(nonce: str, say: Callable[[str], Awaitable[None]]) -> Relay:
        transport.abort()
        return await relay.start(nonce, say)

    with pytest.raises(CloudFailure):
        await transport.open(start, Receiver)
    await transport.finished()
    assert relay.stops == 1


async def test_a_relay_that_ends_as_soon_as_it_starts_is_no_connection() -> None:
    relay = Relay(begins=False)
    transport, receiver = CommandTransport(lambda _: None), Receiver()

    async def start(nonce: str, say: Callable[[str], Awaitable[None]]) -> Relay:
        await relay.start(nonce, say)
        await relay.print(start_line(nonce).decode())
        transport.abort()  # as at the end of its stream
        return relay

    with pytest.raises(CloudFailure):
        await transport.open(start, lambda: receiver)
    await transport.finished()
    assert not receiver.connected
    assert relay.stops == 1


async def test_a_relay_with_another_greeting_is_refused() -> None:
    relay = Relay(begins=False)
    transport = CommandTransport(lambda _: None)
    opening = asyncio.create_task(transport.open(relay.start, Receiver))
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
            await transport.open(relay.start, Receiver)
    async with asyncio.timeout(5):
        await finished.wait()
    assert relay.stops == 1


async def test_pausing_reading_delays_the_output() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    transport.pause_reading()
    assert not transport.is_reading()
    saying = asyncio.create_task(relay.say(b"more"))
    await asyncio.sleep(0)
    assert not saying.done()
    assert receiver.data == b""
    transport.resume_reading()
    await saying
    assert receiver.data == b"more"
    transport.abort()
    await ended(transport, receiver)


async def test_delayed_output_is_dropped_when_the_connection_ends() -> None:
    """The SDK's task must not wait for ever in the callback."""
    relay = Relay()
    transport, receiver = await opened(relay)
    transport.pause_reading()
    saying = asyncio.create_task(relay.say(b"more"))
    await asyncio.sleep(0)
    transport.abort()
    async with asyncio.timeout(5):
        await saying
    await ended(transport, receiver)
    assert receiver.data == b""


async def test_a_writer_is_paused_and_resumed() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    transport.set_write_buffer_limits(high=100)
    relay.may_take.clear()
    transport.write(b"x" * 100)
    assert receiver.paused == []
    transport.write(b"x")
    assert receiver.paused == [True]
    assert transport.get_write_buffer_size() == 101
    relay.may_take.set()
    transport.write(b"x")
    transport.close()
    await ended(transport, receiver)
    assert receiver.paused == [True, False]
    assert len(relay.received) == 102


async def test_bytes_in_flight_count_as_not_sent() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    relay.may_take.clear()
    transport.write(b"x" * 10)
    await relay.tried.wait()
    assert transport.get_write_buffer_size() == 10
    transport.abort()
    await ended(transport, receiver)


async def test_nothing_is_written_after_the_end() -> None:
    relay = Relay()
    transport, receiver = await opened(relay)
    transport.close()
    transport.write(b"late")
    assert transport.is_closing()
    await ended(transport, receiver)
    transport.abort()
    assert relay.received == b""
    assert relay.stops == 1


async def test_a_relay_that_cannot_be_stopped_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay()
    transport, receiver = await opened(relay)

    async def refuse() -> None:
        raise CloudFailure("not reached")

    monkeypatch.setattr(relay, "stop", refuse)
    transport.abort()
    assert await ended(transport, receiver) is None
