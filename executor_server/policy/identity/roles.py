"""Roles: what a credential may do in its own tenant. Admins have every role, in every tenant."""

from __future__ import annotations

from typing import Literal

from executor_server.core import Principal

Role = Literal["user", "approver", "viewer"]
USER: Role = "user"
"""Has sessions: all calls of ExecutorService. A credential without roles is a user."""
APPROVER: Role = "approver"
"""Decides requests that need an approval."""
VIEWER: Role = "viewer"
"""Makes the reading calls of AdminService."""


def effective_roles(roles: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the roles of a credential that is not an admin's and was given `roles`."""
    return roles or (USER,)


def may_view(principal: Principal, tenant: str) -> bool:
    return _has_role_in(principal, VIEWER, tenant)


def may_decide(principal: Principal, tenant: str) -> bool:
    return _has_role_in(principal, APPROVER, tenant)


def _has_role_in(principal: Principal, role: Role, tenant: str) -> bool:
    return principal.is_admin or (role in effective_roles(principal.roles) and principal.tenant == tenant)
