"""The rules of one session: which targets it may connect to, under which limits, with which headers.

They are read from the JSON of a `NetworkRules`. It crosses a border on its way (into the egress process, or into a
machine in the cloud), so each field is checked again. The policy decided them; nothing here grants anything.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, fields
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, Union

from . import reasons
from .host_names import BadName, HostPattern, Target

MAX_PATTERNS = 4096  # in one list
MAX_SECRETS = 256
MAX_METHODS = 64
MAX_PATHS = 256
MAX_HEADER_CHARACTERS = 128
MAX_VALUE_CHARACTERS = 4096
MAX_PATH_CHARACTERS = 2048
# Larger than any figure of a policy, and still exact in JSON and in sums.
MAX_FIGURE = 2**53
# A sentence goes into a reason phrase, which clients print in full.
MESSAGE_CHARACTERS = 200
HOST_CHARACTERS = 100
AUDITS = ("connections", "denials")

_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE = re.compile(r"[!-~]+(?:[ \t]+[!-~]+)*")
_PATH = re.compile(r"/[!-~]*")
# Headers of one connection, those that frame or route a message, and those that client and server agree on before a
# body: to set one would change what the request is.
FRAMING_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# A server answers TRACE, or TRACK, with the request itself: the program would read the secret. CONNECT is for proxies.
METHODS_WITHOUT_SECRETS = frozenset({"CONNECT", "TRACE", "TRACK"})


@dataclass(frozen=True)
class SecretRule:
    """A header that the proxy sets in requests to a host. Its value names secrets and contains none."""

    host: HostPattern  # without a port: all but 80
    header: str
    value: str
    methods: Tuple[str, ...] = ()  # empty: every method but METHODS_WITHOUT_SECRETS
    paths: Tuple[str, ...] = ()  # empty: every path

    @classmethod
    def read(cls, values: Any) -> SecretRule:
        """Raises ValueError."""
        _check_keys("a secret", values, {field.name for field in fields(cls)})
        host = _pattern("a secret's host", values.get("host"))
        header = _text("a secret's header", values.get("header"), _TOKEN, MAX_HEADER_CHARACTERS)
        if header.lower() in FRAMING_HEADERS:
            raise ValueError(f"a secret's header must not be one that frames or routes a request: {header}")
        return cls(
            host,
            header,
            _text("a secret's value", values.get("value"), _VALUE, MAX_VALUE_CHARACTERS),
            _texts("a secret's methods", values.get("methods", ()), MAX_METHODS, _TOKEN, MAX_HEADER_CHARACTERS),
            _texts("a secret's paths", values.get("paths", ()), MAX_PATHS, _PATH, MAX_PATH_CHARACTERS),
        )


class Allowed(NamedTuple):
    rule: str  # the pattern
    secrets: Tuple[SecretRule, ...]  # those for this host; with any, TLS is terminated
    asks: bool = False  # after an approval only


class Refused(NamedTuple):
    reason: str  # one of reasons.py
    message: str  # a sentence for the program and the model that wrote it


class Rules:
    """The rules of one session. Nothing changes them, so connections may share them."""

    def __init__(
        self,
        *,
        allowed: Iterable[HostPattern] = (),
        denied: Iterable[HostPattern] = (),
        secrets: Iterable[SecretRule] = (),
        max_connections: int = 32,
        max_new_connections_per_minute: int = 600,
        max_sent_bytes: int = 100 * 2**20,
        max_received_bytes: int = 1024 * 2**20,
        max_connection_s: float = 3600.0,
        audit: str = "connections",
        ask: Iterable[HostPattern] = (),
    ) -> None:
        self.allowed = tuple(allowed)
        self.denied = tuple(denied)
        self.secrets = tuple(secrets)
        self.max_connections = max_connections
        self.max_new_connections_per_minute = max_new_connections_per_minute
        self.max_sent_bytes = max_sent_bytes
        self.max_received_bytes = max_received_bytes
        self.max_connection_s = max_connection_s
        self.audit = audit
        self.ask = tuple(ask)
        self._allowed_by_host = _by_host(self.allowed)
        self._denied_by_host = _by_host(self.denied)
        self._ask_by_host = _by_host(self.ask)

    @classmethod
    def read(cls, values: Any) -> Rules:
        """Makes rules from the JSON of a NetworkRules. Raises ValueError with a sentence."""
        readers: Dict[str, Callable[[str, Any], Any]] = {
            "allowed": _patterns,
            "denied": _patterns,
            "secrets": _secrets,
            "max_connections": _count,
            "max_new_connections_per_minute": _count,
            "max_sent_bytes": _figure,
            "max_received_bytes": _figure,
            "max_connection_s": _seconds,
            "audit": _audit,
            "ask": _patterns,
        }
        _check_keys("the rules of a network", values, set(readers))
        return cls(**{name: readers[name](name, value) for name, value in values.items()})

    def decide(self, target: Target) -> Union[Allowed, Refused]:
        """Decides on a target, which must be canonical: made by `parse_authority`, or taken from its LiteralAddress."""
        if any(pattern.forbids(target) for pattern in _near(self._denied_by_host, target.host)):
            return Refused(reasons.DENIED, f"{_short(target)} is denied by the policy")
        for pattern in _near(self._allowed_by_host, target.host):
            if pattern.covers(target):
                return Allowed(pattern.text, self._secrets_of(target))
        for pattern in _near(self._ask_by_host, target.host):
            if pattern.covers(target):
                return Allowed(pattern.text, self._secrets_of(target), asks=True)
        if target.is_address:
            opening = f"{_short(target)} is an address; connect to a host by its name"
            return Refused(reasons.ADDRESS_LITERAL, _with_list(opening, (*self.allowed, *self.ask)))
        return Refused(reasons.NOT_ALLOWED, self._refusal(target))

    def _secrets_of(self, target: Target) -> Tuple[SecretRule, ...]:
        # Port 80 is used without TLS, so a secret must not go there.
        if target.port == 80:
            return ()
        hosts = ((secret, secret.host) for secret in self.secrets if secret.host.port in (None, target.port))
        return tuple(secret for secret, host in hosts if host.covers(Target(target.host, host.ports[0])))

    def _refusal(self, target: Target) -> str:
        """Returns a sentence with the nearest allowed targets, ports of the same host first."""
        opening = f"{_short(target)} is not allowed for this session"
        near = list(_near(self._allowed_by_host, target.host))
        ports = sorted(
            {port for pattern in near for port in pattern.ports if pattern.covers(Target(target.host, port))}
        )
        if ports:
            return _with_names(f"{opening}; this host is allowed on port ", map(str, ports), len(ports))
        return _with_list(opening, (*self.allowed, *self.ask), near)


# -- patterns by host


def _by_host(patterns: Iterable[HostPattern]) -> Dict[str, List[HostPattern]]:
    found: Dict[str, List[HostPattern]] = {}
    for pattern in patterns:
        found.setdefault(pattern.host, []).append(pattern)
    return found


def _near(patterns: Mapping[str, List[HostPattern]], host: str) -> Iterator[HostPattern]:
    """The patterns of this host and of those above it, nearest first: no others can cover or forbid it."""
    while host:
        yield from patterns.get(host, ())
        host = host.partition(".")[2]


# -- sentences


def _short(target: Target) -> str:
    text = str(target)
    return text if len(text) <= HOST_CHARACTERS else f"{text[:60]}...{text[-30:]}"


def _with_list(opening: str, allowed: Sequence[HostPattern], first: Sequence[HostPattern] = ()) -> str:
    if not allowed:
        return f"{opening}; nothing is allowed"
    others = (pattern for pattern in allowed if pattern not in first)
    names = (pattern.text for pattern in itertools.chain(first, others))
    return _with_names(f"{opening}; allowed: ", names, len(allowed))


def _with_names(opening: str, names: Iterable[str], count: int) -> str:
    """The opening and as many of these names as a message may have."""
    message = opening
    for left, name in zip(range(count, 0, -1), names):
        added = name if left == count else f", {name}"
        rest = f", and {left - 1} more" if left > 1 else ""
        if len(message) + len(added) + len(rest) > MESSAGE_CHARACTERS:
            return f"{message}{left} hosts" if left == count else f"{message}, and {left} more"
        message += added
    return message


# -- fields of the JSON


def _check_keys(what: str, values: Any, known: "set[str]") -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{what} must be an object, not {type(values).__name__}")
    unknown = sorted(str(key)[:40] for key in values.keys() - known)
    if unknown:
        raise ValueError(f"{what} must not have {', '.join(unknown[:5])}")


def _list(name: str, value: Any, most: int) -> List[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} must be a list, not {type(value).__name__}")
    if len(value) > most:
        raise ValueError(f"{name} must have at most {most} entries, not {len(value)}")
    return list(value)


def _pattern(name: str, value: Any) -> HostPattern:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, not {type(value).__name__}")
    try:
        return HostPattern.parse(value)
    except BadName as error:
        raise ValueError(f"{name}: {value[:HOST_CHARACTERS]!r} {error}") from error


def _patterns(name: str, value: Any) -> Tuple[HostPattern, ...]:
    return tuple(_pattern(name, each) for each in _list(name, value, MAX_PATTERNS))


def _secrets(name: str, value: Any) -> Tuple[SecretRule, ...]:
    return tuple(SecretRule.read(each) for each in _list(name, value, MAX_SECRETS))


def _text(name: str, value: Any, form: "re.Pattern[str]", most: int) -> str:
    # The value itself stays out of the sentence: a policy's writer may have put a secret where its name belongs.
    if not isinstance(value, str) or len(value) > most or form.fullmatch(value) is None:
        raise ValueError(f"{name} must be 1 to {most} printable ASCII characters in the form of RFC 9110")
    return value


def _texts(name: str, value: Any, entries: int, form: "re.Pattern[str]", most: int) -> Tuple[str, ...]:
    return tuple(_text(name, each, form, most) for each in _list(name, value, entries))


def _count(name: str, value: Any) -> int:
    if _figure(name, value) < 1:
        raise ValueError(f"{name} must be at least 1")
    return int(value)


def _figure(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_FIGURE:
        raise ValueError(f"{name} must be a whole number from 0 to {MAX_FIGURE}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a number of seconds above 0")
    return float(value)


def _audit(name: str, value: Any) -> str:
    if value not in AUDITS:
        raise ValueError(f"{name} must be one of {', '.join(AUDITS)}")
    return str(value)
