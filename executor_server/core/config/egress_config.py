"""The configuration of the egress proxy: name resolution, reachable private addresses, and secrets.

The policy names the hosts that sessions may reach. Without such hosts none of this is needed.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from executor_server.core.config.key_types import UNSHOWN, AbsolutePath, Name, ReadForm, Section
from executor_server.core.config.problems import contradiction, refuse
from executor_server.guest.egress.addresses import why_never_opened

MAX_RANGES = 256
MAX_RESOLVERS = 8
MAX_SECRETS = 256

_DNS_PORT = 53
_AUTHORITY = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?):(?P<port>[0-9]{1,5})"
)

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _range_of(text: str) -> str:
    """Returns a range as `ipaddress` writes it. Raises ValueError with a clause."""
    try:
        network: _Network = ipaddress.ip_network(text)
    except ValueError:
        raise ValueError("is not an address range") from None
    if network.prefixlen == 0:
        raise ValueError("covers all addresses, which would disable the check for private ones")
    if network.version == 6 and network.network_address.ipv4_mapped is not None:
        raise ValueError("is an IPv4 range in IPv6 form; write it in IPv4")
    clause = why_never_opened(network)
    if clause is not None:
        raise ValueError(f"{clause}, and the proxy never connects to these")
    return str(network)


def _resolver_of(text: str) -> str:
    """Returns ADDRESS:PORT, with an IPv6 address in brackets. Raises ValueError with a clause."""
    match = _AUTHORITY.fullmatch(text)
    host, port = (match["host"].strip("[]"), int(match["port"])) if match is not None else (text, _DNS_PORT)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError("is not an address") from None
    if address.version == 6 and address.scope_id is not None:
        raise ValueError("has a scope")
    _check_port(port)
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _proxy_of(text: str) -> str:
    """Returns http://HOST:PORT. Raises ValueError with a clause."""
    scheme, separator, authority = text.partition("//")
    if (scheme, separator) != ("http:", "//"):
        raise ValueError("does not begin with http://")
    if "@" in authority:
        raise ValueError("has a user or a password, which other users could read here")
    match = _AUTHORITY.fullmatch(authority.removesuffix("/"))
    if match is None:
        raise ValueError("must have a host and a port, and nothing else")
    _check_port(int(match["port"]))
    return f"http://{match['host']}:{int(match['port'])}"


def _check_port(port: int) -> None:
    if not 0 < port < 2**16:
        raise ValueError(f"has a port of {port}")


_RANGE_FORM = ReadForm('a range of addresses such as "10.20.0.0/16", without bits beyond its prefix', _range_of)
_RESOLVER_FORM = ReadForm('the address of a DNS server, as "10.0.0.53" or "10.0.0.53:5353"', _resolver_of)
_PROXY_FORM = ReadForm('"http://HOST:PORT"', _proxy_of)

AddressRange = Annotated[str, AfterValidator(_RANGE_FORM)]
Resolver = Annotated[str, AfterValidator(_RESOLVER_FORM)]


def _as_array(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class EgressSection(Section):
    """The egress proxy: sessions reach the hosts of their policy through it (docs/policy.md). Its process starts with
    the first session that has such a host."""

    internal: Annotated[tuple[AddressRange, ...], Field(max_length=MAX_RANGES)] = ()
    """Ranges of private addresses that hosts of a policy may resolve to, such as your own mirrors. All other private
    addresses are refused. An address of this host must be listed alone, as /32 or /128."""
    resolver: Annotated[tuple[Resolver, ...], BeforeValidator(_as_array), Field(max_length=MAX_RESOLVERS)] = ()
    """DNS servers, in order of preference; a single one needs no array. Empty: this host's resolver."""
    upstream_proxy: Annotated[Annotated[str, AfterValidator(_PROXY_FORM)] | None, UNSHOWN] = None
    """An HTTP proxy for all connections (CONNECT), used after names and addresses were checked here. Not set: direct
    connections."""
    upstream_resolves: bool = False
    """True if `upstream_proxy` resolves names because this host can't. Addresses are not checked here then; that proxy
    must refuse private ones."""
    ca_file: AbsolutePath | None = None
    """More CA certificates (PEM), such as for your own mirrors. The proxy uses them where it terminates TLS, and
    sandboxes get them in their bundle."""
    secrets: Annotated[dict[Name, AbsolutePath], Field(max_length=MAX_SECRETS), UNSHOWN] = Field(default_factory=dict)
    """Private files with one secret each, by the names that `value` in a policy's `network.secrets` uses. Their content
    never enters a sandbox."""

    @model_validator(mode="after")
    def _check_upstream(self) -> EgressSection:
        if self.upstream_resolves and self.upstream_proxy is None:
            text = "needs upstream_proxy, which is not set"
            refuse(self, [contradiction(("upstream_resolves",), text, True)])
        return self
