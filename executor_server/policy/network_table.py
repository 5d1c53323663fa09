"""The network of a profile in the policy file: hosts by name, limits of connections, and headers with secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import InitErrorDetails

from executor_server.core import NetworkRules, secret_names
from executor_server.core.config import UNSHOWN, Form, ReadForm, Seconds, Section, WrittenSize, contradiction, refuse
from executor_server.guest.egress.host_rules import FRAMING_HEADERS, METHODS_WITHOUT_SECRETS
from executor_server.policy.hosts import is_covered_host, is_denied_host, pattern_of, reaches, undenied

MAX_HOSTS = 256
MAX_SECRETS = 64
MAX_METHODS = 16
MAX_PATHS = 64
MAX_VALUE_CHARS = 1024
MAX_PATH_CHARS = 1024
PLAIN_HTTP = 80

_METHOD = re.compile(r"[A-Z]{1,20}(?:-[A-Z]{1,20}){0,3}")
# A field name of RFC 9110.
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
# Characters of a path by RFC 3986, without those that servers read in different ways: escapes, matrix parameters.
_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()+,=:@-]*)*(?:/\*)?")
_VALUE = re.compile(r"[!-~]+(?: +[!-~]+)*")


def host_of(text: str) -> str:
    """Returns the canonical form of a pattern of hosts. Raises ValueError with a clause."""
    return pattern_of(text).text


def _is_method(text: str) -> bool:
    return _METHOD.fullmatch(text) is not None and text not in METHODS_WITHOUT_SECRETS


def _header_of(text: str) -> str:
    if _HEADER.fullmatch(text) is None:
        raise ValueError("is not a header name")
    if text.lower() in FRAMING_HEADERS:
        raise ValueError("is a header of the connection or of message framing")
    return text


def _value_of(text: str) -> str:
    if len(text) > MAX_VALUE_CHARS or _VALUE.fullmatch(text) is None:
        raise ValueError(f"is not one line of 1 to {MAX_VALUE_CHARS:,} printable ASCII characters, or ends in spaces")
    if not secret_names(text):
        raise ValueError("names no secret (and must not be one itself)")
    if "${" in _without_names(text):
        raise ValueError("has a ${ without the name of a secret and a }")
    return text


def _without_names(text: str) -> str:
    for name in secret_names(text):
        text = text.replace(f"${{{name}}}", "")
    return text


def _path_of(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError("does not begin with /")
    if len(text) > MAX_PATH_CHARS or _PATH.fullmatch(text) is None:
        raise ValueError("has characters that servers read in different ways, a * before its end, or is too long")
    if "//" in text or any(segment in (".", "..") for segment in text.split("/")):
        raise ValueError("has an empty segment, . or ..")
    return text


_HOST_FORM = ReadForm(
    'a host by name ("api.example.com", "*.example.com"), with a port where it is not 443 or 80', host_of
)
_METHOD_FORM = Form('a method in capitals, such as "GET", and not TRACE, TRACK or CONNECT', _is_method)
_HEADER_FORM = ReadForm('the name of a header that requests may have, such as "Authorization"', _header_of)
_VALUE_FORM = ReadForm('text with the name of a secret of `egress.secrets`: "Bearer ${github-bot}"', _value_of)
_PATH_FORM = ReadForm('a path, such as "/status", which may end in "/*" for all below it', _path_of)

HostPatterns = Annotated[tuple[Annotated[str, AfterValidator(_HOST_FORM)], ...], Field(max_length=MAX_HOSTS)]
# Numbers up to here are exact in every JSON, which carries the rules to the proxy.
Volume = Annotated[int, WrittenSize, Field(strict=True, gt=0, le=2**53)]
Methods = Annotated[tuple[Annotated[str, AfterValidator(_METHOD_FORM)], ...], Field(max_length=MAX_METHODS)]
Paths = Annotated[tuple[Annotated[str, AfterValidator(_PATH_FORM)], ...], Field(max_length=MAX_PATHS)]


class NetworkSecretTable(Section):
    """Headers with credentials, which never enter a sandbox: the egress proxy sets them in requests to a host, in place
    of what the sandbox has sent. It terminates TLS to that host. A request whose method or path is not covered goes
    out without the header."""

    host: Annotated[str, AfterValidator(_HOST_FORM)]
    """The host, which `default`, `allowed` or `ask` must cover. Without a port, each port that they cover except 80."""
    methods: Methods = ()
    """Methods of the requests. Empty: all but TRACE, TRACK and CONNECT, which never get the header."""
    paths: Paths = ()
    """Paths of the requests. Empty: all."""
    header: Annotated[str, AfterValidator(_HEADER_FORM)]
    """The name of the header."""
    value: Annotated[str, AfterValidator(_VALUE_FORM), UNSHOWN]
    """The value of the header, with names of secrets of the daemon's configuration, never a secret itself."""


class NetworkTable(Section):
    """Hosts outside of the sandbox that code may reach, through the egress proxy and by name only. Without any, a
    sandbox has no way out."""

    default: HostPatterns = ()
    """Hosts that a session has without asking for them."""
    allowed: HostPatterns = ()
    """Hosts that a client may ask for."""
    ask: HostPatterns = ()
    """Hosts that code of each session may reach after an approval (docs/approvals.md): the connection is held until
    then. Hosts that `default` and `allowed` grant a session need no approval."""
    denied: HostPatterns = ()
    """Hosts that are never reached, with all names below them. This overrides all other keys and the requests of
    clients. Without a port, all ports."""
    max_connections: Annotated[int, Field(strict=True, gt=0, le=4096)] = NetworkRules.max_connections
    """Connections of one session at a time."""
    max_new_connections_per_minute: Annotated[int, Field(strict=True, gt=0, le=1_000_000)] = (
        NetworkRules.max_new_connections_per_minute
    )
    """Connections that one session may begin in a minute."""
    max_sent_bytes: Volume = NetworkRules.max_sent_bytes
    """Bytes that one session may send, in its whole life."""
    max_received_bytes: Volume = NetworkRules.max_received_bytes
    """Bytes that one session may receive, in its whole life."""
    max_connection_s: Seconds = NetworkRules.max_connection_s
    """Seconds after which a connection is closed."""
    audit: Literal["connections", "denials"] = "connections"
    """Records in the audit log: of every connection and every refusal, or of refusals only."""
    secrets: Annotated[tuple[NetworkSecretTable, ...], Field(max_length=MAX_SECRETS)] = ()

    @property
    def has_hosts(self) -> bool:
        """True when sessions can have a network at all."""
        return bool(self.default or self.allowed or self.ask)

    @cached_property
    def undenied_default(self) -> tuple[str, ...]:
        """The default hosts without those that are denied as a whole. Kept, since each new session needs them."""
        return undenied(self.default, self.denied)

    @cached_property
    def undenied_ask(self) -> tuple[str, ...]:
        """The hosts to ask for, likewise."""
        return undenied(self.ask, self.denied)

    @model_validator(mode="after")
    def _check(self) -> NetworkTable:
        refuse(self, [*self._wrong_secrets(), *self._granted_already()])
        return self

    def _granted_already(self) -> Iterator[InitErrorDetails]:
        granted = (*self.default, *self.allowed)
        for index, each in enumerate(self.ask):
            if is_covered_host(pattern_of(each), granted):
                text = "is granted already by `default` or `allowed`"
                yield contradiction(("ask", index), text, each, also=[("default",), ("allowed",)])

    def _wrong_secrets(self) -> Iterator[InitErrorDetails]:
        granted = (*self.default, *self.allowed, *self.ask)
        seen: set[tuple[object, ...]] = set()
        for index, secret in enumerate(self.secrets):
            path = ("secrets", index, "host")
            reached = [host for _, host in reaches((secret.host,), granted)]
            if not reached:
                text = "is covered neither by network.default nor by network.allowed or network.ask"
                yield contradiction(path, text, secret.host, also=[("default",), ("allowed",), ("ask",)])
            elif all(host.port == PLAIN_HTTP for host in reached):
                text = "is covered on port 80 only, where a secret would be sent unencrypted"
                yield contradiction(path, text, secret.host, also=[("default",), ("allowed",)])
            elif all(is_denied_host(host, self.denied) for host in reached):
                yield contradiction(path, "is denied by network.denied", secret.host, also=[("denied",)])
            key = (secret.host, secret.header.lower(), secret.methods, secret.paths)
            if key in seen:
                yield contradiction(path, "has this header for the same requests twice", secret.host)
            seen.add(key)
