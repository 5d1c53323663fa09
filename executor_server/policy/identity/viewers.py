"""Viewers: credentials that may read what happens in the sessions of their own tenant."""

from __future__ import annotations

from executor_server.core import Principal

VIEWER = "viewer"
"""The role of a credential that makes the reading calls of AdminService, about its own tenant."""


def may_view(principal: Principal, tenant: str) -> bool:
    """True for an admin, and for a viewer of this tenant."""
    return principal.is_admin or (VIEWER in principal.roles and principal.tenant == tenant)
