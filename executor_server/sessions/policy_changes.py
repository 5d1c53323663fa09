"""Decides what another policy means for a session that an earlier policy approved: keep, tighten or end it."""

from __future__ import annotations

from dataclasses import dataclass

from executor_server.core import SessionSpec
from executor_server.policy import Policy
from executor_server.sessions.session import Session


@dataclass(frozen=True)
class Keep:
    """The session goes on as it was approved."""


@dataclass(frozen=True)
class Tighten:
    """The session goes on under this spec, which grants nothing more than the new policy does."""

    spec: SessionSpec


@dataclass(frozen=True)
class End:
    """The session ends, for this reason, which its client reads."""

    reason: str


def decide(policy: Policy, session: Session, *, is_new: bool) -> Keep | Tighten | End | None:
    """Returns None when there is nothing to do.

    `is_new`: the session was made while the policy changed. It has nothing to keep yet, and many may have waited to be
    made: none of them gets what is not granted any more.
    """
    if session.spec.policy.fingerprint == policy.fingerprint or session.state == "lost":
        return None
    on_reload = policy.on_reload(session.owner, session.spec)
    if on_reload == "keep" and not is_new:
        return Keep()
    if on_reload == "end" and policy.profile_name(session.owner.tenant) is not None:
        return End("the policy has changed, and ends the sessions of the one before")
    held = policy.tightened(session.owner, session.spec, session.backend_name)
    return End(f"the policy has changed: {held}") if isinstance(held, str) else Tighten(held)
