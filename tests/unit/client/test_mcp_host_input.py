"""The relay of the host's stdin to the SDK: complete, limited, and ended by each event that must end it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from executor_client.mcp import host_input
from executor_client.mcp.host_input import copy_input

WAIT_S = 10.0


@dataclass
class Relay:
    host: int
    sdk: int
    stop: int
    reports: list[str] = field(default_factory=list)

    def all_passed_on(self) -> bytes:
        with os.fdopen(os.dup(self.sdk), "rb") as file:
            return file.read()


@contextmanager
def relaying() -> Iterator[Relay]:
    """Runs a relay, which must have ended by the end of the block."""
    source, host = os.pipe()
    sdk, pipe = os.pipe()
    stop, wake = os.pipe()
    relay = Relay(host, sdk, wake)
    thread = threading.Thread(target=copy_input, args=(source, pipe, stop, relay.reports.append))
    thread.start()
    try:
        yield relay
    finally:
        os.write(wake, b".")
        thread.join(WAIT_S)
        assert not thread.is_alive()
        for descriptor in (source, sdk, stop, wake):
            os.close(descriptor)
        if relay.host >= 0:
            os.close(relay.host)


def test_all_of_it_is_passed_on_until_the_host_closes_its_side() -> None:
    sent = b'{"a": 1}\n' * 50_000 + b"no newline at the end"
    with relaying() as relay:

        def write() -> None:
            with os.fdopen(relay.host, "wb") as file:
                relay.host = -1
                file.write(sent)

        writer = threading.Thread(target=write)
        writer.start()
        assert relay.all_passed_on() == sent
        writer.join()
    assert relay.reports == []


def test_a_signal_ends_the_input_that_the_host_keeps_open() -> None:
    with relaying() as relay:
        os.write(relay.stop, b".")
        assert relay.all_passed_on() == b""


def test_lines_up_to_the_limit_are_passed_on_and_a_longer_one_ends_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_input, "MESSAGE_BYTES_MAX", 100)
    with relaying() as relay:
        os.write(relay.host, b"a" * 100 + b"\n" + b"b" * 60)
        os.write(relay.host, b"b" * 40 + b"\n" + b"c" * 50 + b"\n")
        os.write(relay.host, b"d" * 101)
        passed_on = relay.all_passed_on()
    assert passed_on.splitlines()[:3] == [b"a" * 100, b"b" * 100, b"c" * 50]
    assert relay.reports == ["closing the connection: a message of the host has more than 100 bytes"]


def test_an_sdk_that_has_gone_ends_the_relay() -> None:
    with relaying() as relay:
        os.dup2(os.open(os.devnull, os.O_RDONLY), relay.sdk)
        os.write(relay.host, b"a\n")
    assert relay.reports == []
