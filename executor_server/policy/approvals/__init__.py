"""Approvals: requests that the policy leaves to a person (`ask`), who may decide them, and what was decided."""

from executor_server.policy.approvals.approvals import (
    MAX_WAITING,
    MAX_WHAT_CHARS,
    Approval,
    ApprovalKind,
    ApprovalObserver,
    ApprovalRequired,
    Approvals,
    Decision,
    Ruling,
    Wanted,
)

__all__ = [
    "MAX_WAITING",
    "MAX_WHAT_CHARS",
    "Approval",
    "ApprovalKind",
    "ApprovalObserver",
    "ApprovalRequired",
    "Approvals",
    "Decision",
    "Ruling",
    "Wanted",
]
