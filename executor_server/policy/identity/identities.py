"""The credentials of a call, and the principal that they prove.

There are up to three: the token in the call, the certificate of its TLS connection, and the user at the other end of
its Unix socket. `Identities.principal_of` is the one place that checks them together: a token must be valid, and all
credentials that name a tenant must name the same one. It needs nothing else, so a long call can be checked again when
tokens or policy have changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from executor_server.core import Principal
from executor_server.policy.identity.tokens import Tokens

# Certificates whose digest is cached; each is sent again with every call of its connection.
_MAX_KNOWN_CERTIFICATES = 1024


@dataclass(frozen=True)
class TenantRights:
    """A tenant, and the rights of its certificates and users."""

    tenant: str
    is_admin: bool = False  # may make admin calls
    roles: tuple[str, ...] = ()


class TenantMap(Protocol):
    """Maps certificates and users to their tenants and rights; the policy implements it."""

    def tenant_of_certificate(self, names: Sequence[str], fingerprint: str) -> TenantRights | None: ...

    def tenant_of_uid(self, uid: int) -> TenantRights | None: ...


@dataclass(frozen=True)
class Certificate:
    """A client certificate; TLS has verified its signature and its validity."""

    names: tuple[str, ...]  # DNS names and URIs; the common name when there are no alternative names
    fingerprint: str  # SHA-256 of the whole certificate, in hex


@dataclass(frozen=True)
class Shown:
    """The credentials of a call."""

    token_id: str | None = None
    certificate: Certificate | None = None
    uid: int | None = None


class Identities:
    """Maps credentials to principals, by the tokens and the policy that are in force at the time."""

    def __init__(self, tokens: Tokens, policy: Callable[[], TenantMap | None] = lambda: None) -> None:
        self.tokens = tokens
        self._policy = policy

    def principal_of(self, shown: Shown) -> Principal | None:
        """Returns the caller; None when no credential is valid, or when two name different tenants."""
        found: list[Principal] = []
        if shown.token_id is not None:
            principal = self.tokens.principal_of_id(shown.token_id)
            if principal is None or (shown.certificate is None and shown.uid is None):
                return principal
            found.append(principal)
        policy = self._policy()
        if policy is not None and shown.certificate is not None:
            certificate = shown.certificate
            mapped = policy.tenant_of_certificate(certificate.names, certificate.fingerprint)
            name = certificate.names[0] if certificate.names else certificate.fingerprint
            found += _principals(mapped, f"certificate:{name}")
        if policy is not None and shown.uid is not None:
            found += _principals(policy.tenant_of_uid(shown.uid), f"uid:{shown.uid}")
        # The first one counts: a token names the intended rights more exactly than a connection does.
        return found[0] if len({principal.tenant for principal in found}) == 1 else None

    def knows_uid(self, uid: int) -> bool:
        """Returns True when the policy maps this user to a tenant."""
        policy = self._policy()
        return policy is not None and policy.tenant_of_uid(uid) is not None


def certificate_in(auth_context: Mapping[str, Sequence[bytes]]) -> Certificate | None:
    """Returns the client certificate in grpc's authentication context; None without one."""
    pem = _first(auth_context, "x509_pem_cert")
    if pem is None:
        return None
    if _first(auth_context, "x509_subject_alternative_name") is None:
        raw = tuple(auth_context.get("x509_common_name", ()))
    else:
        # Only these two kinds: an e-mail address could look like a host's name.
        raw = (*auth_context.get("peer_dns", ()), *auth_context.get("peer_uri", ()))
    fingerprint = _fingerprint(pem)
    return None if fingerprint is None else Certificate(_texts(raw), fingerprint)


def _principals(mapped: TenantRights | None, name: str) -> list[Principal]:
    return [] if mapped is None else [Principal(mapped.tenant, name, mapped.is_admin, mapped.roles)]


def _first(auth_context: Mapping[str, Sequence[bytes]], key: str) -> bytes | None:
    return next(iter(auth_context.get(key, ())), None)


def _texts(names: Sequence[bytes]) -> tuple[str, ...]:
    """Returns the names that are printable ASCII, as all host names and URIs are; no tenant has others."""
    return tuple(name.decode() for name in names if name.isascii() and name.decode().isprintable())


@lru_cache(_MAX_KNOWN_CERTIFICATES)
def _fingerprint(pem: bytes) -> str | None:
    lines = pem.strip().splitlines()
    try:
        return hashlib.sha256(base64.b64decode(b"".join(lines[1:-1]), validate=True)).hexdigest()
    except binascii.Error:
        return None
