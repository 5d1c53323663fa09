"""What a call shows of its caller, and whose that is.

Up to three things can speak for a caller: the token in the call, the certificate of its TLS connection, the user at
the other end of its Unix socket. `Identities.principal_of` is the one place that judges them together: a token that is
shown must hold; whatever else names a tenant must name the same. It looks at nothing else, so a call which lasts can
be judged again when tokens or policy have changed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from executor_server.model import Principal
from executor_server.tokens import Tokens

# Certificates in use at one time, of which what has been made out is kept.
_MAX_KNOWN_CERTIFICATES = 1024


class TenantMap(Protocol):
    """Who certificates and users are, and whether they may make admin calls: the policy in force knows."""

    def tenant_of_certificate(self, names: Sequence[str], fingerprint: str) -> tuple[str, bool] | None: ...

    def tenant_of_uid(self, uid: int) -> tuple[str, bool] | None: ...


@dataclass(frozen=True)
class Certificate:
    """A client certificate that one of our authorities signed; TLS has seen to that, and that it was valid."""

    names: tuple[str, ...]  # DNS names and URIs, or the common name where there are no alternative names
    fingerprint: str  # SHA-256 of the whole certificate, in hex


@dataclass(frozen=True)
class Shown:
    """What a call shows of its caller."""

    token_id: str | None = None
    certificate: Certificate | None = None
    uid: int | None = None


class Identities:
    """Knows callers by the tokens, and by the policy that is in force when it is asked."""

    def __init__(self, tokens: Tokens, policy: Callable[[], TenantMap | None] = lambda: None) -> None:
        self.tokens = tokens
        self._policy = policy

    def principal_of(self, shown: Shown) -> Principal | None:
        """Who that is; nobody when nothing of it holds, or it contradicts itself."""
        found: list[Principal] = []
        if shown.token_id is not None:
            principal = self.tokens.principal_of_id(shown.token_id)
            if principal is None:
                return None
            found.append(principal)
        policy = self._policy()
        if policy is not None and shown.certificate is not None:
            certificate = shown.certificate
            mapped = policy.tenant_of_certificate(certificate.names, certificate.fingerprint)
            name = certificate.names[0] if certificate.names else certificate.fingerprint
            found += _principals(mapped, f"certificate:{name}")
        if policy is not None and shown.uid is not None:
            found += _principals(policy.tenant_of_uid(shown.uid), f"uid:{shown.uid}")
        # The first counts: a token says more exactly than a connection which rights are meant.
        return found[0] if len({principal.tenant for principal in found}) == 1 else None

    def knows_uid(self, uid: int) -> bool:
        """Whether that user is anybody's."""
        policy = self._policy()
        return policy is not None and policy.tenant_of_uid(uid) is not None


def certificate_in(auth_context: Mapping[str, Sequence[bytes]]) -> Certificate | None:
    """The client certificate of a connection, as grpc tells it. None without one."""
    pem = _first(auth_context, "x509_pem_cert")
    if pem is None:
        return None
    if _first(auth_context, "x509_subject_alternative_name") is None:
        raw = tuple(auth_context.get("x509_common_name", ()))
    else:
        # Only these two kinds: an e-mail address that reads like a host's name is not one.
        raw = (*auth_context.get("peer_dns", ()), *auth_context.get("peer_uri", ()))
    fingerprint = _fingerprint(pem)
    return None if fingerprint is None else Certificate(_texts(raw), fingerprint)


def _principals(mapped: tuple[str, bool] | None, name: str) -> list[Principal]:
    return [] if mapped is None else [Principal(mapped[0], name, mapped[1])]


def _first(auth_context: Mapping[str, Sequence[bytes]], key: str) -> bytes | None:
    return next(iter(auth_context.get(key, ())), None)


def _texts(names: Sequence[bytes]) -> tuple[str, ...]:
    """Those that are printable ASCII, as all names of hosts and all URIs are; no other is anybody's."""
    return tuple(name.decode() for name in names if name.isascii() and name.decode().isprintable())


@lru_cache(_MAX_KNOWN_CERTIFICATES)
def _fingerprint(pem: bytes) -> str | None:
    lines = pem.strip().splitlines()
    try:
        return hashlib.sha256(base64.b64decode(b"".join(lines[1:-1]), validate=True)).hexdigest()
    except binascii.Error:
        return None
