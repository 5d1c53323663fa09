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


def test_more_addresses_than_the_first_table_holds_are_all_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = own_addresses._ipv4()
    monkeypatch.setattr(own_addresses, "_ENTRIES", (1, 16_384))
    assert own_addresses._ipv4() == whole


def test_table_that_is_never_large_enough_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut list would open the addresses that are missing in it."""
    monkeypatch.setattr(own_addresses, "_ENTRIES", (1,))
    with pytest.raises(OSError, match="1 addresses or more"):
        own_addresses._ipv4()
