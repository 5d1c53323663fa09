"""The relay as the command that it is, between its streams and a socket that the test listens at."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from executor_server.backends.guest_archive import pack_guest
from executor_server.guest.wire.lines import LineDecoder, encode_lines, start_line
from tests.support.interpreters import TRIED, require_python

NONCE = "0123456789abcdef"
TIMEOUT_S = 20.0
MiB = 2**20
# Far more than both ends, their pipes and the relay itself hold.
MUCH_BYTES = 8 * MiB


@dataclass
class Relay:
    process: subprocess.Popen[bytes]
    guest: socket.socket  # the end that a guest would have

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, size: int | None = None) -> bytes:
        """So many bytes that the guest said; without a number, all to the end."""
        assert self.process.stdout is not None
        decoder, got = LineDecoder(NONCE), b""
        while size is None or len(got) < size:
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                break
            got += b"".join(decoder.feed(data))
        assert decoder.started
        return got

    def stderr_text(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def exit_code(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def memory_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


Start = Callable[..., Relay]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="relay-")))
        archive = pack_guest(directory).path
        path = directory / "guest.sock"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(TIMEOUT_S)

        def start(python: Path = Path(sys.executable)) -> Relay:
            process = subprocess.Popen(
                [python, "-I", "-S", archive, "relay", path, NONCE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            stack.callback(_end, process)
            guest, _ = listener.accept()
            guest.settimeout(TIMEOUT_S)
            stack.callback(guest.close)
            return Relay(process, guest)

        yield start


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # closing flushes bytes that were not written yet
            stream.close()


def _write_all(stream: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        stream.write(data)


def lines(data: bytes) -> bytes:
    return encode_lines(data, 1)[0]


@pytest.mark.parametrize("version", TRIED)
def test_both_directions_are_carried_at_once_on_every_python(start: Start, version: str) -> None:
    python = require_python(version)
    relay = start(python)
    data = os.urandom(MUCH_BYTES)

    def echo() -> None:
        for _ in iter(int, 1):
            piece = relay.guest.recv(65536)
            if not piece:
                return
            relay.guest.sendall(piece)

    threads = [threading.Thread(target=echo), threading.Thread(target=relay.write, args=(lines(data),))]
    for thread in threads:
        thread.start()
    assert relay.read(len(data)) == data
    assert relay.process.stdin is not None
    relay.process.stdin.close()
    assert relay.exit_code() == 4
    for thread in threads:
        thread.join()


def test_the_start_comes_before_anybody_has_said_anything(start: Start) -> None:
    relay = start()
    assert relay.process.stdout is not None
    assert os.read(relay.process.stdout.fileno(), 1000) == start_line(NONCE)


def test_what_the_guest_said_before_it_closed_arrives(start: Start) -> None:
    relay = start()

    def say() -> None:
        relay.guest.sendall(b"x" * MiB)
        relay.guest.close()

    sender = threading.Thread(target=say)
    sender.start()
    assert relay.read() == b"x" * MiB
    assert relay.exit_code() == 0
    sender.join()


def test_what_the_daemon_said_before_it_closed_arrives(start: Start) -> None:
    relay = start()
    relay.write(lines(b"shut down"))
    assert relay.process.stdin is not None
    relay.process.stdin.close()
    assert relay.guest.recv(100) == b"shut down"
    assert relay.guest.recv(100) == b""
    assert relay.exit_code() == 4


def test_nobody_listening_is_said(start: Start) -> None:
    relay = start()
    with tempfile.TemporaryDirectory() as empty:
        command = [*relay.process.args[:-2], f"{empty}/guest.sock", NONCE]  # type: ignore[index]
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (66, "")
    assert ended.stderr.endswith("No such file or directory\n") and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("nonce", ["", "a b", "a\nb", "x" * 65, "\u00fc"])
def test_a_nonce_that_could_be_more_than_a_word_is_refused(start: Start, nonce: str) -> None:
    relay = start()
    command = [*relay.process.args[:-1], nonce]  # type: ignore[index]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stdout == ""


def test_a_bad_line_ends_the_relay_and_nothing_of_it_goes_on(start: Start) -> None:
    relay = start()
    relay.write(lines(b"good"))
    assert relay.guest.recv(100) == b"good"
    relay.write(b"garbage\n")
    assert relay.guest.recv(100) == b""
    assert relay.exit_code() == 3
    assert relay.stderr_text().count("\n") == 1


def test_a_guest_that_does_not_read_makes_the_daemon_wait(start: Start) -> None:
    relay = start()
    assert relay.process.stdin is not None
    os.set_blocking(relay.process.stdin.fileno(), False)
    data, sent = memoryview(lines(bytes(MUCH_BYTES))), 0
    before = relay.memory_bytes()
    quiet = 0
    # Full, when it takes nothing more though it had the time to: it is asked over and over, and does nothing else.
    while quiet < 3 and sent < len(data):
        try:
            sent += os.write(relay.process.stdin.fileno(), data[sent : sent + 65536])
            quiet = 0
        except BlockingIOError:
            _let_run(relay)
            quiet += 1
    assert sent < len(data) // 2
    assert relay.memory_bytes() - before < 3 * MiB
    received = 0
    os.set_blocking(relay.process.stdin.fileno(), True)
    rest = threading.Thread(target=relay.write, args=(bytes(data[sent:]),))
    rest.start()
    while received < MUCH_BYTES:
        received += len(relay.guest.recv(65536))
    rest.join()


def test_a_daemon_that_does_not_read_makes_the_guest_wait(start: Start) -> None:
    relay = start()
    relay.guest.setblocking(False)
    before, sent, quiet = relay.memory_bytes(), 0, 0
    while quiet < 3 and sent < MUCH_BYTES:
        try:
            sent += relay.guest.send(bytes(65536))
            quiet = 0
        except BlockingIOError:
            _let_run(relay)
            quiet += 1
    assert sent < MUCH_BYTES // 2
    assert relay.memory_bytes() - before < 3 * MiB
    relay.guest.close()
    assert len(relay.read()) == sent
    assert relay.exit_code() == 0


def test_a_reader_that_is_gone_ends_the_relay(start: Start) -> None:
    relay = start()
    assert relay.process.stdout is not None
    relay.process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        relay.guest.sendall(b"x" * MiB)
    assert relay.exit_code() == 4


def _let_run(relay: Relay) -> None:
    """Until it sleeps: it has nothing to do, or can't go on."""
    for _ in range(100_000):
        state = Path(f"/proc/{relay.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "S":
            return
        os.sched_yield()
    os.kill(relay.process.pid, signal.SIGKILL)
    raise AssertionError("the relay does not come to rest")
