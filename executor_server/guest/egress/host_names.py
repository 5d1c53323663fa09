"""Names of hosts: one canonical form, targets of requests, and the patterns that rules consist of.

Everything that is compared, resolved, dialled, shown and recorded is the canonical form: lower case, ASCII (A-labels of
IDNA), no dot at the end. A text either has exactly one canonical form or is refused, so that no two programs can read
two hosts in it. Two families of texts are refused although a resolver would take them:

- Addresses. `inet_aton`, and with it `getaddrinfo`, reads `127.1`, `0x7f000001`, `017700000001` and `2130706433` as
  127.0.0.1. Each part of such a spelling is a number, so a name whose last label is one is taken for an address, as the
  URL standard does. No top-level domain is a number.
- Unicode that IDNA maps to something else: full-width digits and dots, ligatures, capitals, the sharp s. A full-width
  `127.0.0.1` maps to 127.0.0.1, and IDNA 2003 and 2008 send a name with a sharp s to two owners. Only Unicode that is
  its own mapping gets an A-label.

Errors are clauses that continue a text: "has a port of 0", after `pypi.org:0`.
"""

from __future__ import annotations

import codecs
import ipaddress
import re
import unicodedata
from dataclasses import dataclass
from encodings.idna import nameprep
from typing import NamedTuple, NoReturn, Optional, Tuple

from .suffixes import is_public_suffix

MAX_NAME_CHARACTERS = 253
MAX_LABEL_CHARACTERS = 63
# Room for a name, brackets or a wildcard, a dot at the end, a port. Longer texts are refused unread.
_MAX_TEXT_CHARACTERS = MAX_NAME_CHARACTERS + 16

WEB_PORTS = (443, 80)

# A codec is imported at its first use, which fails in a process that has given up its access to files by then.
codecs.lookup("punycode")
codecs.lookup("idna")

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_IPV6_CHARACTERS = frozenset("0123456789abcdefABCDEF:.")
_A_LABEL_PREFIX = "xn--"
_CAPITALS = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
# Characters that IDNA reads as the dot between labels.
_FOREIGN_DOTS = frozenset("\u3002\uff0e\uff61")
_MISPLACED = {
    "@": "has user information (an @)",
    "/": "has a scheme or a path; give the host alone",
    "\\": "has a backslash",
    "?": "has a query",
    "#": "has a fragment",
    "%": "has a percent sign",
    ",": "has a comma; give one host",
    ";": "has a semicolon",
    "*": "has a * elsewhere than as the whole first label",
    "[": "has brackets without an IPv6 address in them",
    "]": "has brackets without an IPv6 address in them",
}


class BadName(ValueError):
    """A text that is not a host name. The message is a clause: "has a port of 0"."""


class LiteralAddress(BadName):
    """An IP address, in any spelling, where a name is expected.

    `target` is set where the address is in its one canonical spelling: rules may list such an address as such.
    """

    def __init__(self, clause: str, target: Optional[Target] = None) -> None:
        super().__init__(clause)
        self.target = target


class Target(NamedTuple):
    """A host and a port that a program asked for; canonical when it comes from this module."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_bracketed(self.host)}:{self.port}"

    @property
    def is_address(self) -> bool:
        return ":" in self.host or _NUMBER.fullmatch(self.host.rpartition(".")[2]) is not None


class _Host(NamedTuple):
    text: str
    is_address: bool


def canonical_host(text: str) -> str:
    """Returns the canonical form of a name. Raises BadName; LiteralAddress for an address in any spelling."""
    host = _read_host(text)
    if host.is_address:
        _refuse_address()
    return host.text


def parse_authority(text: str, *, default_port: Optional[int] = None) -> Target:
    """Returns the target of a CONNECT, or of an `http://` URL or Host header, with its default port.

    Raises BadName, and LiteralAddress for an address in any spelling.
    """
    written, port = _split_port(text)
    host = _read_host(written)
    if port is None:
        port = default_port
    if port is None:
        raise BadName("has no port")
    if host.is_address:
        _refuse_address(Target(host.text, port))
    return Target(host.text, port)


@dataclass(frozen=True)
class HostPattern:
    """A host, or all names below one, on one port or on those that its list implies. Made by `parse`."""

    host: str  # canonical, without the wildcard
    wildcard: bool = False  # covers names below `host`, at any depth, and not `host` itself
    port: Optional[int] = None
    is_address: bool = False

    @classmethod
    def parse(cls, text: str) -> HostPattern:
        """Reads `host`, `host:port`, `*.host`, `*.host:port`, or an address as it is listed. Raises BadName."""
        if text == "*" or text.startswith("*:"):
            raise BadName("covers every host; name the hosts")
        wildcard = text.startswith("*.")
        written, port = _split_port(text[2:] if wildcard else text)
        host = _read_host(written)
        if wildcard and host.is_address:
            raise BadName("has a wildcard before an address")
        if wildcard and is_public_suffix(host.text):
            raise BadName(
                f"covers everything below {host.text}, where anybody may have a name; name the hosts"
                f" (a list of denied hosts takes {host.text} without the wildcard)"
            )
        return cls(host.text, wildcard, port, host.is_address)

    @property
    def text(self) -> str:
        """The canonical form."""
        return ("*." if self.wildcard else "") + _bracketed(self.host) + ("" if self.port is None else f":{self.port}")

    @property
    def ports(self) -> Tuple[int, ...]:
        """The ports of an allowed pattern."""
        return WEB_PORTS if self.port is None else (self.port,)

    def covers(self, target: Target) -> bool:
        """True when this pattern allows the target: one without a port allows the ports of the web."""
        if target.port not in self.ports:
            return False
        return self._is_above(target.host) if self.wildcard else target.host == self.host

    def forbids(self, target: Target) -> bool:
        """True when this pattern denies the target: it denies names below its own too; without a port, on all ports."""
        if self.port is not None and target.port != self.port:
            return False
        return self._is_above(target.host) or (target.host == self.host and not self.wildcard)

    def _is_above(self, host: str) -> bool:
        return not self.is_address and host.endswith("." + self.host)


def is_within(asked: HostPattern, allowed: HostPattern) -> bool:
    """True when every target that `asked` covers is covered by `allowed`."""
    if asked.is_address != allowed.is_address or not set(asked.ports) <= set(allowed.ports):
        return False
    if not allowed.wildcard:
        return not asked.wildcard and asked.host == allowed.host
    return asked.host.endswith("." + allowed.host) or (asked.wildcard and asked.host == allowed.host)


# -- one host


def _read_host(text: str) -> _Host:
    """Reads a host without a port: a name, or an address in its canonical spelling."""
    if not text:
        raise BadName("is empty")
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise BadName(f"is longer than {MAX_NAME_CHARACTERS} characters")
    if text.startswith("["):
        return _read_ipv6(text)
    _refuse_characters(text)
    if text.count(":") > 1:
        if _IPV6_CHARACTERS.issuperset(text):
            _refuse_address(clause="is an IPv6 address, and without brackets")
        raise BadName("has more than one colon")
    if ":" in text:
        raise BadName("has a port where none may be")
    name = text.translate(_CAPITALS)
    labels = (name[:-1] if name.endswith(".") else name).split(".")
    canonical = ".".join([_canonical_label(label) for label in labels])
    if len(canonical) > MAX_NAME_CHARACTERS:
        raise BadName(f"is longer than {MAX_NAME_CHARACTERS} characters")
    if _NUMBER.fullmatch(canonical.rpartition(".")[2]) is None:
        return _Host(canonical, False)
    # The text itself and not its canonical form: a dot at the end makes it another spelling.
    if not _is_ipv4(text):
        _refuse_address(clause="is an address in a spelling of its own, or ends in a number as none but addresses do")
    return _Host(text, True)


def _read_ipv6(text: str) -> _Host:
    inner = text[1:-1]
    if "%" in inner and ":" in inner:
        _refuse_address(clause="is an IPv6 address with a scope")
    try:
        address = ipaddress.IPv6Address(inner)
    except ValueError:
        raise BadName(_MISPLACED["["]) from None
    # An IPv4 address has one spelling, which is not an IPv6 address: rules for the one must see the other.
    if not text.endswith("]") or str(address) != inner or address.ipv4_mapped is not None:
        _refuse_address(clause="is an address in a spelling of its own")
    return _Host(inner, True)


def _is_ipv4(text: str) -> bool:
    try:
        # Compared, because early versions of Python 3.9 read 010.0.0.1.
        return str(ipaddress.IPv4Address(text)) == text
    except ValueError:
        return False


def _refuse_address(target: Optional[Target] = None, clause: str = "is an address") -> NoReturn:
    raise LiteralAddress(f"{clause}; connect to a host by its name", target)


def _refuse_characters(text: str) -> None:
    for character in text:
        if character in _MISPLACED:
            raise BadName(_MISPLACED[character])
        if character <= " " or character == "\x7f":
            raise BadName("has a space or a control character")
        if character in _FOREIGN_DOTS:
            raise BadName("has a dot that is not the ASCII one")


def _canonical_label(label: str) -> str:
    if not label:
        raise BadName("has an empty label (two dots, or one at the start)")
    if not label.isascii():
        label = _to_a_label(label)
    elif label.startswith(_A_LABEL_PREFIX):
        _check_a_label(label)
    if len(label) > MAX_LABEL_CHARACTERS:
        raise BadName(f"has a label longer than {MAX_LABEL_CHARACTERS} characters")
    if _LABEL.fullmatch(label) is None:
        raise BadName("has characters other than letters, digits and hyphens, or a hyphen at the end of a label")
    return label


# -- IDNA


def _to_a_label(label: str) -> str:
    """Returns the A-label of Unicode that IDNA leaves as it is."""
    # Before anything else: mapping takes time that grows with the square of the length (CVE-2022-45061).
    if len(label) > MAX_LABEL_CHARACTERS:
        raise BadName(f"has a label longer than {MAX_LABEL_CHARACTERS} characters")
    # Letters, marks and digits. Names with other symbols exist, and can be given as A-labels.
    plain = all(_LABEL.fullmatch(f"x{each}x") or unicodedata.category(each)[0] in "LMN" for each in label)
    if not plain or label.startswith(_A_LABEL_PREFIX) or "-" in (label[0], label[-1]):
        raise BadName("has characters that no name has")
    try:
        own_mapping = nameprep(label) == label and _is_normal(label)
        encoded = label.encode("punycode").decode("ascii")
    except UnicodeError:
        raise BadName("has characters that no name has") from None
    if not own_mapping:
        raise BadName("has capitals or characters that IDNA maps to others; give its ASCII form (xn--)")
    return _A_LABEL_PREFIX + encoded


def _check_a_label(label: str) -> None:
    """Refuses ASCII that claims to be Unicode and is not: programs that decode it would see another name."""
    encoded = label[len(_A_LABEL_PREFIX) :]
    if len(label) > MAX_LABEL_CHARACTERS:
        raise BadName(f"has a label longer than {MAX_LABEL_CHARACTERS} characters")
    try:
        decoded = encoded.encode("ascii").decode("punycode")
        decoded.encode("utf-8")  # surrogates
        same = decoded.encode("punycode").decode("ascii") == encoded and "Cc" not in map(unicodedata.category, decoded)
    except (UnicodeError, ValueError, OverflowError, IndexError):
        same, decoded = False, ""
    if not same or decoded.isascii() or not _is_normal(decoded) or not _FOREIGN_DOTS.isdisjoint(decoded):
        raise BadName("has a label that begins with xn-- and is no name of IDNA")


def _is_normal(label: str) -> bool:
    return unicodedata.normalize("NFKC", label.lower()) == label


# -- ports


def _split_port(text: str) -> Tuple[str, Optional[int]]:
    """Splits `host:port`. Colons in brackets, and those of an IPv6 address without brackets, belong to the host."""
    if len(text) > _MAX_TEXT_CHARACTERS:
        raise BadName(f"is longer than {MAX_NAME_CHARACTERS} characters")
    # A port may hide user information: `pypi.org:443@example.com` is a port to one reader and a password to another.
    if not text.startswith("["):
        _refuse_characters(text)
    host, colon, port = text.rpartition(":")
    if not colon or port.endswith("]"):
        return text, None
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        if host.startswith("["):
            raise BadName(_MISPLACED["["])
        return text, None
    if _PORT.fullmatch(port) is None or int(port) > 65535:
        shown = port if 0 < len(port) <= 10 and port.isascii() and port.isprintable() else "that is no number"
        raise BadName(f"has a port of {shown}" if shown == port else f"has a port {shown}")
    return host, int(port)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
