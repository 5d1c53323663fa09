"""A text has one canonical form or is refused, and no accepted text is an address to anything that resolves names."""

# ruff: noqa: RUF001 - the look-alikes are what is tested
from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from executor_server.guest.egress.host_names import (
    BadName,
    HostPattern,
    LiteralAddress,
    Target,
    canonical_host,
    is_within,
    parse_authority,
)
from executor_server.guest.egress.suffixes import is_public_suffix

CANONICAL = {
    "pypi.org": "pypi.org",
    "PyPI.ORG": "pypi.org",
    "pypi.org.": "pypi.org",
    "mirror": "mirror",
    "_dmarc.example.com": "_dmarc.example.com",
    "my_host.example.com": "my_host.example.com",
    "r3---sn-4g5e6nze.googlevideo.com": "r3---sn-4g5e6nze.googlevideo.com",
    "1and1.com": "1and1.com",
    "3com": "3com",
    "127.0.0.1.nip.io": "127.0.0.1.nip.io",
    "0x7f.example": "0x7f.example",
    "1.2.3.4a": "1.2.3.4a",
    "münchen.de": "xn--mnchen-3ya.de",
    "xn--mnchen-3ya.de": "xn--mnchen-3ya.de",
    "XN--MNCHEN-3YA.DE": "xn--mnchen-3ya.de",
    "xn--strae-oqa.de": "xn--strae-oqa.de",  # straße.de, which IDNA 2008 allows
    "пример.рф": "xn--e1afmkfd.xn--p1ai",
    "例え.jp": "xn--r8jz45g.jp",
    "xn--i-7iq.ws": "xn--i-7iq.ws",
    "a" * 63 + ".org": "a" * 63 + ".org",
    ".".join(["a" * 49] * 5) + ".org.": ".".join(["a" * 49] * 5) + ".org",  # 253 characters
}

# An address to some program: whatever reads it so must not be handed it as a name.
ADDRESSES = [
    "127.0.0.1",
    "1.2.3.4",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "0",
    "0.",
    "0x0",
    "0x",
    "2130706433",
    "0x7f000001",
    "0x7f.1",
    "017700000001",
    "0177.0.0.1",
    "0177.0x0.0.1",
    "127.0.0.01",
    "169.254.169.254",
    "4294967295",
    "99999999999999999999",
    "256.256.256.256",
    "1.2.3.4.5",
    "example.1",
    "example.0x1f",
    "::1",
    "::",
    "[::1]",
    "[::]",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[0:0:0:0:0:ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b::169.254.169.254]",
    "[fe80::1%eth0]",
    "[fe80::1%25eth0]",
    "[FE80::1]",
    "[fd00:ec2::254]",
    "2001:db8::1",
]

NO_NAMES = [
    "",
    ".",
    "..",
    ".org",
    ".pypi.org",
    "pypi..org",
    "pypi.org..",
    " pypi.org",
    "pypi.org ",
    "pypi org",
    "pypi.org\n",
    "pypi.org\r\nHost: evil.example",
    "pypi.org\x00",
    "pypi.org:443",
    "user@pypi.org",
    "pypi.org/",
    "pypi.org/simple",
    "https://pypi.org",
    "pypi.org\\@evil.example",
    "pypi.org?x",
    "pypi.org#x",
    "pypi%2eorg",
    "pypi.org,evil.example",
    "pypi.org;evil.example",
    "*.pypi.org",
    "*",
    "-pypi.org",
    "pypi-.org",
    "pypi.org-",
    "pypi!.org",
    "[pypi.org]",
    "[",
    "]",
    "[]",
    "[::1",
    "::1]",
    "a" * 64 + ".org",
    "a." * 127 + "org",
    "a" * 100_000,
    "ä" * 100_000,
    # Unicode that is mapped to something else, or that only some programs accept.
    "１２７.0.0.1",
    "１２７．０．０．１",
    "127。0。0。1",
    "127｡0｡0｡1",
    "pypi。org",
    "pypi．org",
    "ｐｙｐｉ.org",
    "ⓟypi.org",
    "①②⑦.0.0.1",
    "𝟏𝟐𝟕.0.0.1",
    "𝐩ypi.org",
    "straße.de",
    "σοφός.gr",
    "MÜNCHEN.de",
    "mu\u0308nchen.de",  # two code points for one letter
    "pypi\u00ad.org",  # soft hyphen
    "py\u200bpi.org",  # zero-width space
    "py\u200dpi.org",
    "\u202epypi.org",
    "pypi.org\ufeff",
    "\u2488.example",  # DIGIT ONE FULL STOP
    "pypi\u2024org",  # one dot leader
    "pypi.org\u2044x",  # fraction slash
    "pypi\uff0forg",
    "\u2100.example",  # ACCOUNT OF: maps to a/c
    "\u212a8s.io",  # the Kelvin sign
    "İ.com",
    "ü!.de",
    "-ü.de",
    "ü-.de",
    "xn--ü.de",
    "\ud800.org",
    # ASCII that claims to be Unicode.
    "xn--",
    "xn--.org",
    "xn--a.org",
    "xn--pypi-.org",
    "xn--99999999.org",
    "xn--a-ecp.ru-",
    "xn--" + "ｐ".encode("punycode").decode() + ".org",
    "xn--" + "。".encode("punycode").decode() + ".org",
    "xn--" + "MÜ".encode("punycode").decode().lower() + "-.org",
]


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_a_name_has_one_canonical_form(text: str, canonical: str) -> None:
    assert canonical_host(text) == canonical
    assert canonical_host(canonical) == canonical


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_is_refused_in_every_spelling(text: str) -> None:
    with pytest.raises(LiteralAddress, match="address"):
        canonical_host(text)


@pytest.mark.parametrize("text", NO_NAMES)
def test_a_text_that_is_no_name_is_refused_with_a_clause(text: str) -> None:
    with pytest.raises(BadName) as caught:
        canonical_host(text)
    assert str(caught.value).split()[0] in {"is", "has", "covers", "begins"}
    assert len(str(caught.value)) < 200
    assert str(caught.value).isascii(), "a clause must fit into a reason phrase"


@pytest.mark.parametrize("text", ["straße.de", "ﬁle.example", "MÜNCHEN.de", "\u212a8s.io"])
def test_unicode_that_idna_maps_is_refused_rather_than_sent_to_another_owner(text: str) -> None:
    with pytest.raises(BadName, match="xn--"):
        canonical_host(text)


# -- properties

_DIGITS: dict[str, Callable[[int], str]] = {
    "decimal": str,
    "octal": lambda number: f"0{number:o}",
    "hex": hex,
    "capital hex": lambda number: f"0X{number:X}",
    "padded": lambda number: f"000{number}",
    "full width": lambda number: "".join(chr(0xFF10 + int(digit)) for digit in str(number)),
    "mathematical": lambda number: "".join(chr(0x1D7CE + int(digit)) for digit in str(number)),
}


@st.composite
def _addresses(draw: st.DrawFn) -> str:
    numbers = draw(st.lists(st.integers(0, 2**32), min_size=1, max_size=5))
    parts = [_DIGITS[draw(st.sampled_from(sorted(_DIGITS)))](number) for number in numbers]
    text = draw(st.sampled_from([".", ".", "。", "．", "｡"])).join(parts)
    return text + draw(st.sampled_from(["", "", ".", " ", "%31", ":80", "\x00", "x", ".x"]))


_CHARACTERS = st.one_of(
    st.sampled_from("abcxnABCXN0123456789-._-..:[]%@/*"),
    st.sampled_from("äßςé１２。．｡\u200d\u00ad\u212aｐпи例٣"),
    st.characters(),
)
_TEXTS = st.one_of(
    st.text(_CHARACTERS, max_size=40),
    st.text(st.sampled_from("abx0179.-"), max_size=24),
    _addresses(),
    st.from_regex(r"xn--[a-z0-9-]{1,20}(\.org)?", fullmatch=True),
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)


def _reads_as_address(text: str) -> bool:
    readers: list[Callable[[str], object]] = [
        socket.inet_aton,
        lambda text: socket.inet_pton(socket.AF_INET6, text.strip("[]")),
        # AI_NUMERICHOST: what getaddrinfo takes for an address, without asking anybody. It encodes Unicode by IDNA.
        lambda text: socket.getaddrinfo(text, 443, flags=socket.AI_NUMERICHOST),
    ]
    for read in readers:
        try:
            read(text)
        except (OSError, UnicodeError, ValueError):
            continue
        return True
    return False


@given(_TEXTS)
@example("127.1")
@example("１２７.0.0.1")
def test_no_accepted_text_is_an_address_to_a_resolver(text: str) -> None:
    try:
        canonical = canonical_host(text)
    except BadName:
        return
    assert not _reads_as_address(text)
    assert not _reads_as_address(canonical)


@given(_TEXTS)
def test_a_canonical_form_is_its_own_and_plain(text: str) -> None:
    try:
        canonical = canonical_host(text)
    except BadName:
        return
    assert canonical_host(canonical) == canonical
    assert canonical_host(canonical.upper() + ".") == canonical
    assert canonical.isascii()
    assert canonical == canonical.lower()
    assert set(canonical) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.")
    assert 1 <= len(canonical) <= 253
    assert all(1 <= len(label) <= 63 for label in canonical.split("."))


@given(_TEXTS)
def test_nothing_but_bad_name_is_raised(text: str) -> None:
    readers: list[Callable[[str], object]] = [canonical_host, parse_authority, HostPattern.parse]
    for read in readers:
        try:
            read(text)
        except BadName as error:
            assert str(error).isascii()


@given(st.ip_addresses())
def test_an_address_in_its_canonical_spelling_can_be_listed_and_is_told_apart(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    text = f"[{address}]:8080" if address.version == 6 else f"{address}:8080"
    with pytest.raises(LiteralAddress) as caught:
        parse_authority(text)
    target = caught.value.target
    if mapped:
        assert target is None
        return
    assert target is not None
    assert target.is_address
    assert str(target) == text
    pattern = HostPattern.parse(text)
    assert pattern.is_address
    assert pattern.text == text
    assert pattern.covers(target)
    assert pattern.forbids(target)


# -- targets

TARGETS = {
    "pypi.org:443": Target("pypi.org", 443),
    "PyPI.org.:80": Target("pypi.org", 80),
    "mirror:65535": Target("mirror", 65535),
    "a.b:1": Target("a.b", 1),
}

NO_TARGETS = {
    "pypi.org": "no port",
    "pypi.org:": "a port",
    "pypi.org:0": "a port of 0",
    "pypi.org:0443": "a port of 0443",
    "pypi.org:65536": "a port of 65536",
    "pypi.org:0x1bb": "a port of 0x1bb",
    "pypi.org:https": "a port of https",
    "pypi.org: 443": "a space",
    "pypi.org:４４３": "a port that is no number",
    "pypi.org:" + "4" * 200: "a port that is no number",
    ":443": "empty",
    "user@pypi.org:443": "user information",
    "pypi.org:443@evil.example:443": "user information",
    "pypi.org:443/simple": "a path",
    "http://pypi.org:80": "a scheme or a path",
    "pypi.org:443:443": "more than one colon",
    "::1:443": "without brackets",
    "pypi.org:443, evil.example:443": "a comma",
    "[pypi.org]:443": "brackets",
    "[::1]443": "brackets",
    "[::1]:0": "a port of 0",
    "*.pypi.org:443": r"a \*",
}


@pytest.mark.parametrize(("text", "target"), TARGETS.items())
def test_an_authority_is_a_canonical_host_and_a_port(text: str, target: Target) -> None:
    assert parse_authority(text) == target
    assert str(target) == f"{target.host}:{target.port}"


@pytest.mark.parametrize(("text", "clause"), NO_TARGETS.items())
def test_an_authority_that_can_be_read_in_two_ways_is_refused(text: str, clause: str) -> None:
    with pytest.raises(BadName, match=clause):
        parse_authority(text)


def test_the_authority_of_a_url_has_the_default_port() -> None:
    assert parse_authority("pypi.org", default_port=80) == Target("pypi.org", 80)
    assert parse_authority("pypi.org:8080", default_port=80) == Target("pypi.org", 8080)
    with pytest.raises(LiteralAddress) as caught:
        parse_authority("[2001:db8::1]", default_port=80)
    assert caught.value.target == Target("2001:db8::1", 80)


@pytest.mark.parametrize(
    "text", ["127.1:443", "0177.0.0.1:443", "1.2.3.4.:443", "[::ffff:1.2.3.4]:443", "[::ffff:102:304]:443", "[::0]:443"]
)
def test_an_address_in_a_spelling_of_its_own_is_never_a_target(text: str) -> None:
    with pytest.raises(LiteralAddress) as caught:
        parse_authority(text)
    assert caught.value.target is None


# -- patterns

PATTERNS = {
    "pypi.org": HostPattern("pypi.org"),
    "PyPI.org.": HostPattern("pypi.org"),
    "pypi.org:443": HostPattern("pypi.org", port=443),
    "*.pythonhosted.org": HostPattern("pythonhosted.org", wildcard=True),
    "*.pythonhosted.org:8443": HostPattern("pythonhosted.org", wildcard=True, port=8443),
    "*.example.co.uk": HostPattern("example.co.uk", wildcard=True),
    "com": HostPattern("com"),
    "10.1.2.3:8080": HostPattern("10.1.2.3", port=8080, is_address=True),
    "[2001:db8::1]": HostPattern("2001:db8::1", is_address=True),
    "*.bücher.example": HostPattern("xn--bcher-kva.example", wildcard=True),
}

NO_PATTERNS = {
    "*": "covers every host",
    "*:443": "covers every host",
    "*.": "empty",
    "*.com": "anybody",
    "*.COM.": "anybody",
    "*.co.uk": "anybody",
    "*.com.br": "anybody",
    "*.ca.us": "anybody",
    "*.рф": "anybody",
    "a.*.b": r"a \*",
    "ex*ample.com": r"a \*",
    "*.*.com": r"a \*",
    "example.*": r"a \*",
    "example.com:*": r"a \*",
    "example.com:0": "a port of 0",
    "10.0.0.0/8": "a path",
    "*.10.0.0.1": "before an address",
    "*.[::1]": "before an address",
    "010.0.0.1": "a spelling of its own",
    "[::ffff:10.0.0.1]": "a spelling of its own",
    "": "empty",
}


@pytest.mark.parametrize(("text", "pattern"), PATTERNS.items())
def test_a_pattern_is_read_in_its_canonical_form(text: str, pattern: HostPattern) -> None:
    assert HostPattern.parse(text) == pattern
    assert HostPattern.parse(pattern.text) == pattern


@pytest.mark.parametrize(("text", "clause"), NO_PATTERNS.items())
def test_a_pattern_that_says_too_much_or_nothing_is_refused(text: str, clause: str) -> None:
    with pytest.raises(BadName, match=clause):
        HostPattern.parse(text)


@pytest.mark.parametrize(
    ("pattern", "target", "covered", "forbidden"),
    [
        ("x.org", "x.org:443", True, True),
        ("x.org", "x.org:80", True, True),
        ("x.org", "x.org:8443", False, True),
        ("x.org", "a.x.org:443", False, True),
        ("x.org", "ax.org:443", False, False),
        ("x.org", "org:443", False, False),
        ("x.org:443", "x.org:443", True, True),
        ("x.org:443", "x.org:80", False, False),
        ("x.org:8443", "x.org:8443", True, True),
        ("x.org:8443", "a.x.org:8443", False, True),
        ("*.x.org", "x.org:443", False, False),
        ("*.x.org", "a.x.org:443", True, True),
        ("*.x.org", "a.b.x.org:80", True, True),
        ("*.x.org", "a.x.org:22", False, True),
        ("*.x.org", "ax.org:443", False, False),
        ("*.x.org", "a.x.org.evil.com:443", False, False),
        ("org", "x.org:443", False, True),
    ],
)
def test_allowed_patterns_are_exact_and_denied_ones_reach_down(
    pattern: str, target: str, covered: bool, forbidden: bool
) -> None:
    assert HostPattern.parse(pattern).covers(parse_authority(target)) is covered
    assert HostPattern.parse(pattern).forbids(parse_authority(target)) is forbidden


@pytest.mark.parametrize("host", ["com", "org", "co.uk", "com.au", "gov.in", "ne.jp", "k12.il", "tx.us", "uk.com"])
def test_names_below_which_anybody_may_register_are_public_suffixes(host: str) -> None:
    assert is_public_suffix(host)


@pytest.mark.parametrize("host", ["pypi.org", "example.com", "bbc.co.uk", "web.de", "a.b.c", "aws.com", "company.us"])
def test_names_of_one_owner_are_no_public_suffixes(host: str) -> None:
    assert not is_public_suffix(host)


_HOSTS = st.lists(st.sampled_from(["a", "b", "example"]), min_size=0, max_size=3).map(
    lambda labels: ".".join([*labels, "example", "org"])
)
_PATTERNS = st.builds(
    HostPattern, _HOSTS, wildcard=st.booleans(), port=st.sampled_from([None, 80, 443, 8443])
) | st.builds(HostPattern, st.just("10.0.0.1"), port=st.sampled_from([None, 80]), is_address=st.just(True))


@given(_PATTERNS, _PATTERNS)
def test_a_pattern_within_another_covers_no_target_that_the_other_does_not(
    asked: HostPattern, allowed: HostPattern
) -> None:
    hosts = [asked.host, allowed.host, "example.org", "10.0.0.1"]
    targets = [
        Target(below + host, port)
        for host in hosts
        for below in ("", "a.", "b.", "zz.", "zz.a.")
        for port in (22, 80, 443, 8443)
    ]
    covered = [target for target in targets if asked.covers(target)]
    assert covered
    assert is_within(asked, allowed) is all(allowed.covers(target) for target in covered)


@given(_PATTERNS)
def test_the_text_of_a_pattern_reads_as_the_pattern(pattern: HostPattern) -> None:
    assert HostPattern.parse(pattern.text) == pattern
