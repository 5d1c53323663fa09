"""The modules of packages that were asked for, authorized as far as the policy allows.

A refused one is no failure yet: the program may not import it, and its import says why when it does.
"""

from __future__ import annotations

from collections.abc import Sequence

from executor_client.errors import PolicyViolationError

PATTERNS_MAX = 256
"""Import patterns of one call; the protocol's limit."""


def patterns_of(modules: Sequence[str]) -> list[str]:
    """Returns import patterns for modules and what is below them, as many as one call may have."""
    return [f"{module}.*" for module in modules[:PATTERNS_MAX]]


def without_refused(patterns: Sequence[str], refusal: PolicyViolationError) -> list[str]:
    """Returns those to ask for again; none when it can't be seen which ones are refused."""
    refused = {violation.requested for violation in refusal.violations}
    allowed = [pattern for pattern in patterns if pattern not in refused]
    return allowed if len(allowed) < len(patterns) else []
