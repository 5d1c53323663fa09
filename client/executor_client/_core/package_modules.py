"""Import patterns for the modules of requested packages, as far as the policy allows.

A refused module is not an error yet: the program may not import it, and its import would give the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor_client.errors import PolicyViolationError

PATTERNS_MAX = 256
"""Import patterns of one call; the protocol's limit."""


def patterns_of(modules: Sequence[str]) -> list[str]:
    """Returns import patterns for modules with their submodules, as many as one call may have."""
    return [f"{module}.*" for module in modules[:PATTERNS_MAX]]


def without_refused(patterns: Sequence[str], refusal: PolicyViolationError) -> list[str]:
    """Returns the patterns to retry; none if the refusal does not name the refused ones."""
    refused = {violation.requested for violation in refusal.violations}
    allowed = [pattern for pattern in patterns if pattern not in refused]
    return allowed if len(allowed) < len(patterns) else []
