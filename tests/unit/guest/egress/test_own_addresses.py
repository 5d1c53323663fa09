"""The addresses of this host, as the kernel lists them."""

from __future__ import annotations

import ipaddress
import socket

import psutil
import pytest

from executor_server.guest.egress import own_addresses
from executor_server.guest.egress.own_addresses import OwnAddresses


def test_every_address_of_every_interface_is_known() -> None:
    expected = {
        ipaddress.ip_address(entry.address.partition("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    assert expected <= OwnAddresses()()
    assert ipaddress.ip_address("127.0.0.1") in OwnAddresses()()


def test_kernel_is_asked_again_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    asked = []

    def ipv4() -> set[own_addresses.Address]:
        asked.append(now[0])
        return set()

    monkeypatch.setattr("executor_server.guest.egress.own_addresses.time.monotonic", lambda: now[0])
    monkeypatch.setattr(own_addresses, "_ipv4", ipv4)
    own = OwnAddresses()
    for now[0] in (1.0, 1.5, 1.9, 2.1):
        own()
    assert asked == [1.0, 2.1]


def test_more_addresses_than_the_first_table_holds_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = own_addresses._ipv4()
    monkeypatch.setattr(own_addresses, "_ENTRIES", (1, 16_384))
    assert own_addresses._ipv4() == whole


def test_table_that_is_never_large_enough_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut list would open the addresses that are missing in it."""
    monkeypatch.setattr(own_addresses, "_ENTRIES", (1,))
    with pytest.raises(OSError, match="1 addresses or more"):
        own_addresses._ipv4()
