"""Identifies the callers of client listeners: by token, client certificate, or user of the peer socket."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, cast

import grpc

from executor_server.api.handlers import Context
from executor_server.core import Principal, Reason, Unauthenticated
from executor_server.policy.identity import Identities, Shown, certificate_in


class CallerSource(Protocol):
    """Identifies the caller of a call.

    Credentials are collected in two steps: the connection is known only when the handler runs, and a call with a wrong
    token is denied before that. They are kept while the call lasts and checked again.
    """

    @property
    def checks_connections(self) -> bool:
        """False if connections can't identify callers; then a call without a token is denied at once."""
        ...

    def named_in(self, call: grpc.HandlerCallDetails) -> Any:
        """Returns the credentials in a call's metadata. Raises Unauthenticated for wrong ones."""
        ...

    def shown_by(self, named: Any, context: Context | None) -> Hashable:
        """Returns all credentials of a call; `context` is None if connections are not checked."""
        ...

    def principal_of(self, shown: Any) -> Principal | None:
        """Returns the caller by the policy and tokens in force now; None for an unknown one."""
        ...

    async def refresh(self) -> None:
        """Reads changed tokens; called now and then."""
        ...


class ClientCallers:
    """Clients of the daemon. `uid_of_peer` returns the user behind a connection of the peer socket, by its name."""

    def __init__(
        self, identities: Identities, *, checks_connections: bool, uid_of_peer: Callable[[str], int | None]
    ) -> None:
        self.checks_connections = checks_connections
        self._identities = identities
        self._uid_of_peer = uid_of_peer

    def named_in(self, call: grpc.HandlerCallDetails) -> str | None:
        """Returns the id of a call's token, None for a call without one. Raises Unauthenticated for a wrong one."""
        given = [value for key, value in call.invocation_metadata or () if key == "authorization"]
        if not given:
            return None
        if len(given) == 1 and isinstance(given[0], str):
            scheme, _, token = given[0].partition(" ")
            token_id = self._identities.tokens.id_of(token)
            if token_id is not None and scheme.lower() == "bearer":
                return token_id
        raise unauthenticated()

    def shown_by(self, named: str | None, context: Context | None) -> Shown:
        if context is None:
            return Shown(named)
        certificate = certificate_in(cast("Any", context).auth_context())
        return Shown(named, certificate, self._uid_of_peer(cast("Any", context).peer()))

    def principal_of(self, shown: Shown) -> Principal | None:
        return self._identities.principal_of(shown)

    async def refresh(self) -> None:
        await self._identities.tokens.refresh()


def unauthenticated() -> Unauthenticated:
    return Unauthenticated(
        Reason.UNAUTHENTICATED,
        "no valid credential: send `authorization: Bearer TOKEN` in the metadata; or use a client certificate or a "
        "peer-socket user that the policy maps to a tenant (the token's tenant, if both are given)",
    )
