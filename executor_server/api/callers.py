"""Identifies the callers of client listeners: by token, client certificate, or user of the peer socket."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, cast

from executor_server.api.handlers import Context
from executor_server.core import Principal, Reason, Unauthenticated
from executor_server.policy.identity import Identities, Shown, certificate_in


class CallerSource(Protocol):
    """Identifies the caller of a call. Its credentials are kept while the call lasts, and checked again."""

    def shown_by(self, method: str, context: Context) -> Hashable:
        """Returns the credentials in a call's metadata and its connection. Raises Unauthenticated for wrong ones.

        Called before any message of the call is read.
        """
        ...

    def principal_of(self, shown: Any) -> Principal | None:
        """Returns the caller by the policy and tokens in force now; None for an unknown one."""
        ...

    async def refresh(self) -> None:
        """Reads changed tokens; called regularly."""
        ...


class ClientCallers:
    """Clients of the daemon. `uid_of_peer` returns the user behind a connection of the peer socket, by its name.

    If `checks_connections` is false, it is not called, and certificates are ignored.
    """

    def __init__(
        self, identities: Identities, *, checks_connections: bool, uid_of_peer: Callable[[str], int | None]
    ) -> None:
        self._checks_connections = checks_connections
        self._identities = identities
        self._uid_of_peer = uid_of_peer

    def shown_by(self, method: str, context: Context) -> Shown:
        token_id = self._token_in(context)
        if not self._checks_connections:
            return Shown(token_id)
        certificate = certificate_in(cast("Any", context).auth_context())
        return Shown(token_id, certificate, self._uid_of_peer(cast("Any", context).peer()))

    def _token_in(self, context: Context) -> str | None:
        """Returns the id of a call's token, None for a call without one. Raises Unauthenticated for a wrong one."""
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if not given:
            return None
        if len(given) == 1 and isinstance(given[0], str):
            scheme, _, token = given[0].partition(" ")
            token_id = self._identities.tokens.id_of(token)
            if token_id is not None and scheme.lower() == "bearer":
                return token_id
        raise unauthenticated()

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
