"""Names of sessions: each is that of one session of its owner, from the request on that makes the session."""

from __future__ import annotations

from collections.abc import Mapping

from executor_server.core import NotFound, PreconditionFailed, Principal, Reason
from executor_server.sessions.creations import Creations
from executor_server.sessions.session import Session


class SessionNames:
    """Finds sessions by their names, and keeps a name from being given twice."""

    def __init__(self, sessions: Mapping[tuple[str, str], Session], creations: Creations) -> None:
        self._sessions = sessions
        self._creations = creations

    def named(self, principal: Principal, name: str) -> Session:
        """Returns the caller's session of a name. Raises NotFound."""
        session = self._holder(principal.tenant, name)
        if session is None:
            raise NotFound(Reason.SESSION_NOT_FOUND, f"there is no session named {name!r}")
        return session

    async def rename(self, session: Session, name: str) -> None:
        """Gives a session another name; an empty one takes it away. Raises PreconditionFailed when it is taken."""
        if name != session.spec.name:
            await session.admit_rename(name)
            self.require_free(session.owner.tenant, name)
            session.rename(name)

    def require_free(self, tenant: str, name: str) -> str:
        """Returns the name. Raises PreconditionFailed when a session of the tenant has it, or is being made with it.

        A lost session has no use for its name, and gives it up.
        """
        if not name:
            return name
        holder = self._holder(tenant, name)
        if self._creations.names(tenant, name) or (holder is not None and holder.state != "lost"):
            raise PreconditionFailed(Reason.NAME_TAKEN, f"another session of yours has the name {name!r}")
        if holder is not None:
            holder.rename("")
        return name

    def _holder(self, tenant: str, name: str) -> Session | None:
        owned = (each for (owner, _), each in self._sessions.items() if owner == tenant)
        return next((each for each in owned if each.spec.name == name), None)
