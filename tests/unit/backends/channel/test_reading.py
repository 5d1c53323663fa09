"""The two reasons for which a guest is not read, and the connections that they hold for."""

from __future__ import annotations

import asyncio

from executor_server.backends.channel.flow_control import ReadingControl


class Transport(asyncio.Transport):
    """Knows only if it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = True

    def is_closing(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return self.reads

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def test_a_pause_holds_for_a_later_connection_once_its_guest_has_answered() -> None:
    """A guest that is not read before that would look dead because its owner is busy."""
    reading = ReadingControl()
    reading.pause()
    for _ in range(2):
        transport = Transport()
        reading.attach(transport)
        assert transport.reads
        reading.greeted()
        assert not transport.reads
        reading.detach()
    last = Transport()
    reading.attach(last)
    reading.greeted()
    reading.resume()
    assert last.reads


def test_a_guest_is_read_when_neither_its_owner_nor_the_fairness_holds_it_back() -> None:
    reading, transport = ReadingControl(), Transport()
    reading.attach(transport)
    reading.greeted()
    reading.pause()
    reading.rest()
    reading.resume()
    assert not transport.reads
    reading.pause()
    reading.go_on()
    assert not transport.reads
    reading.resume()
    assert transport.reads


def test_a_rest_for_other_tenants_begins_before_the_guest_has_answered() -> None:
    reading, transport = ReadingControl(), Transport()
    reading.attach(transport)
    reading.pause()
    assert transport.reads
    reading.rest()
    assert not transport.reads
