"""Addresses that no name may lead to: smokescreen's classes, what IANA reserves, and the addresses of the host."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.egress.addresses import Address, AddressRules

OWN = [ipaddress.ip_address(each) for each in ("198.20.1.1", "10.0.0.7", "172.17.0.1", "2a00:1450::7", "fd12::7")]
EVERYTHING = ("0.0.0.0/0", "::/0")


def rules(*internal: str) -> AddressRules:
    return AddressRules(internal, lambda: OWN)


# Address, part of the clause, and true when `internal` may open it.
REFUSED = [
    # smokescreen: not global unicast
    ("0.0.0.0", "unspecified", False),
    ("0.1.2.3", "unspecified", False),
    ("127.0.0.1", "loopback", False),
    ("127.255.255.254", "loopback", False),
    ("169.254.0.1", "link-local", False),
    ("169.254.169.254", "metadata", False),
    ("169.254.170.2", "link-local", False),  # credentials of ECS
    ("224.0.0.1", "multicast", False),
    ("239.255.255.250", "multicast", False),
    ("255.255.255.255", "broadcast", False),
    ("240.0.0.1", "reserved", False),
    ("::", "unspecified", False),
    ("::1", "loopback", False),
    ("fe80::1", "link-local", False),
    ("ff02::1", "multicast", False),
    ("ff0e::1", "multicast", False),
    # smokescreen: private
    ("10.0.0.1", "private", True),
    ("10.255.255.255", "private", True),
    ("172.16.0.1", "private", True),
    ("172.31.255.255", "private", True),
    ("192.168.0.1", "private", True),
    ("fc00::1", "private", True),
    ("fd12:3456::1", "private", True),
    # smokescreen: carrier-grade NAT
    ("100.64.0.1", "carrier-grade NAT", True),
    ("100.127.255.255", "carrier-grade NAT", True),
    # smokescreen: IPv4 within IPv6
    ("64:ff9b::1", "NAT64", False),
    ("64:ff9b::808:808", "NAT64", False),
    ("64:ff9b::169.254.169.254", "NAT64", False),
    ("64:ff9b:1::a00:1", "NAT64", False),
    ("2002:7f00:1::", "6to4", False),
    ("2002:808:808::1", "6to4", False),
    ("2001::1", "Teredo", False),
    ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "Teredo", False),
    ("::ffff:127.0.0.1", "loopback", False),
    ("::ffff:169.254.169.254", "metadata", False),
    ("::ffff:a9fe:a9fe", "metadata", False),
    ("::ffff:10.0.0.1", "private", True),
    ("::ffff:0.0.0.0", "unspecified", False),
    ("::127.0.0.1", "IPv4-compatible", False),
    ("::a9fe:a9fe", "IPv4-compatible", False),
    ("::ffff:0:127.0.0.1", "IPv4-translated", False),
    # metadata services
    ("100.100.100.200", "metadata", False),
    ("168.63.129.16", "metadata", False),
    ("192.0.0.192", "metadata", False),
    ("fd00:ec2::254", "metadata", False),
    ("fd00:ec2::253", "metadata", False),
    ("fd20:ce::254", "metadata", False),
    ("fd00:c1::a9fe:a9fe", "metadata", False),
    ("fd00:42::42", "metadata", False),
    # reserved
    ("192.0.0.1", "protocol assignments", False),
    ("192.88.99.1", "6to4", False),
    ("198.18.0.1", "benchmarks", True),
    ("198.19.255.255", "benchmarks", True),
    ("192.0.2.1", "documentation", True),
    ("198.51.100.1", "documentation", True),
    ("203.0.113.1", "documentation", True),
    ("2001:db8::1", "documentation", True),
    ("3fff::1", "documentation", False),
    ("2001:2::1", "protocol assignments", False),
    ("2001:10::1", "protocol assignments", False),
    ("100::1", "discard", False),
    ("5f00::1", "segment routing", False),
    ("fec0::1", "site-local", False),
    ("4000::1", "not a global unicast", False),
    ("1::1", "not a global unicast", False),
    ("fe00::1", "not a global unicast", False),
    # scoped, and no addresses
    ("fe80::1%eth0", "scope", False),
    ("fe80::1%1", "scope", False),
    ("2606:4700::1111%lo", "scope", False),
    ("", "not an IP address", False),
    ("localhost", "not an IP address", False),
    ("127.1", "not an IP address", False),
    ("2130706433", "not an IP address", False),
    ("0x7f.0.0.1", "not an IP address", False),
    ("8.8.8.8:443", "not an IP address", False),
    ("[::1]", "not an IP address", False),
    ("8.8.8.8 ", "not an IP address", False),
    ("8.8.8.8/32", "not an IP address", False),
]
ALLOWED = [
    "8.8.8.8",
    "1.1.1.1",
    "9.255.255.255",
    "11.0.0.0",
    "100.63.255.255",
    "100.128.0.0",
    "126.255.255.255",
    "128.0.0.0",
    "169.253.255.255",
    "172.15.255.255",
    "172.32.0.0",
    "192.167.255.255",
    "192.169.0.0",
    "198.17.255.255",
    "198.20.0.0",
    "223.255.255.255",
    "::ffff:8.8.8.8",
    "2606:4700:4700::1111",
    "2a00:1450:4001::200e",
    "2001:4860:4860::8888",
    "2003::1",
]


@pytest.mark.parametrize(("address", "clause", "may_be_internal"), REFUSED)
def test_an_address_of_a_special_class_is_refused_and_internal_opens_private_ones_only(
    address: str, clause: str, may_be_internal: bool
) -> None:
    why = rules().why_refused(address)
    assert why is not None
    assert clause in why
    assert why.split()[0] in {"is", "has"}
    assert rules(*EVERYTHING).why_refused(address) == (None if may_be_internal else why)


@pytest.mark.parametrize("address", ALLOWED)
def test_a_public_address_is_allowed(address: str) -> None:
    assert rules().why_refused(address) is None


def test_internal_opens_what_it_lists() -> None:
    some = rules("10.20.0.0/16", "fd00:1::/32")
    assert some.why_refused("10.20.3.4") is None
    assert some.why_refused("::ffff:10.20.3.4") is None
    assert some.why_refused("fd00:1::1") is None
    assert some.why_refused("10.21.0.1") == "is a private address"
    assert some.why_refused("fd00:2::1") == "is a private address"


@pytest.mark.parametrize(
    "own", ["198.20.1.1", "10.0.0.7", "172.17.0.1", "2a00:1450::7", "fd12::7", "::ffff:198.20.1.1"]
)
def test_an_address_of_this_host_is_open_only_where_it_is_listed_exactly(own: str) -> None:
    exact = own.replace("::ffff:", "")
    bits = 128 if ":" in exact else 32
    assert rules().why_refused(own) is not None
    assert rules(*EVERYTHING).why_refused(own) == "is an address of this host itself"
    parent = str(ipaddress.ip_network(f"{exact}/{bits}").supernet())
    assert rules(parent).why_refused(own) == "is an address of this host itself"
    assert rules(f"{exact}/{bits}").why_refused(own) is None
    assert rules(exact).why_refused(own) is None


@pytest.mark.parametrize(
    "address", ["127.0.0.1/32", "169.254.169.254/32", "fd00:ec2::254/128", "::1/128", "224.0.0.1/32"]
)
def test_an_exact_listing_does_not_open_what_stays_closed(address: str) -> None:
    assert rules(address).why_refused(address.partition("/")[0]) is not None


def test_addresses_of_this_host_are_asked_for_each_time() -> None:
    own: list[Address] = []
    some = AddressRules((), lambda: own)
    assert some.why_refused("8.8.8.8") is None
    own.append(ipaddress.ip_address("8.8.8.8"))
    assert some.why_refused("8.8.8.8") == "is an address of this host itself"


def test_nothing_is_allowed_while_the_addresses_of_this_host_are_unknown() -> None:
    def fail() -> list[Address]:
        raise OSError(23, "Too many open files in system")

    assert AddressRules((), fail).why_refused("8.8.8.8") == "can't be compared with those of this host now"


@pytest.mark.parametrize(
    "text", ["", "10.0.0.0/33", "10.0.0.1/8", "10.0.0.0/255.0.0.1", "localhost", "*", "::ffff:10.0.0.0/104", "fe80::/x"]
)
def test_a_range_that_is_none_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a range of addresses|write it as IPv4"):
        rules(text)


# -- properties


@given(st.ip_addresses(v=4))
def test_the_mapped_form_of_an_address_has_the_class_of_the_address(address: ipaddress.IPv4Address) -> None:
    for internal in ((), EVERYTHING):
        some = rules(*internal)
        plain = some.why_refused(str(address))
        assert some.why_refused(f"::ffff:{address}") == plain
        assert some.why_refused(f"0:0:0:0:0:FFFF:{address}") == plain
        assert some.why_refused(f"::ffff:{int(address) >> 16:x}:{int(address) & 0xFFFF:x}") == plain


@given(st.ip_addresses() | st.sampled_from([ipaddress.ip_address("169.254.169.254"), ipaddress.ip_address("10.0.0.1")]))
def test_an_address_that_python_knows_not_to_be_global_is_refused(address: Address) -> None:
    """A second opinion: Python's own table may lack ranges that ours has, and has none that ours lacks."""
    if rules().why_refused(str(address)) is None:
        plain = getattr(address, "ipv4_mapped", None) or address
        assert plain.is_global
        assert not plain.is_multicast
        assert not plain.is_reserved


@given(st.ip_addresses())
def test_internal_never_opens_what_a_connection_from_this_host_alone_may_reach(address: Address) -> None:
    if rules(*EVERYTHING).why_refused(str(address)) is None:
        plain = getattr(address, "ipv4_mapped", None) or address
        assert not plain.is_loopback
        assert not plain.is_link_local
        assert not plain.is_multicast
        assert not plain.is_unspecified


@given(st.text(max_size=30))
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        assert rules(*EVERYTHING).why_refused(text) is not None
