"""A policy as people and models read it: `executor policy` and the resource of `executor mcp`."""

from __future__ import annotations

from typing import Any

import pytest

from executor_client import FileLimits, Limits, PackagesPolicy, Policy, PolicyRef, Quotas, StateRules
from executor_client._core.policy_text import policy_lines

MOST: dict[str, Any] = {"max_requirements": 3, "max_environment_bytes": 2**30}


def policy(packages: PackagesPolicy) -> Policy:
    names: dict[str, Any] = dict.fromkeys(
        (
            "default_imports",
            "allowed_imports",
            "denied_imports",
            "refused_language",
            "tool_placements",
            "allowed_tools",
        ),
        (),
    )
    limits: dict[str, Any] = dict.fromkeys(
        ("default_limits", "max_limits", "execution_default_limits", "execution_max_limits"), Limits()
    )
    return Policy(
        policy=PolicyRef("p", "1", "f"),
        images=("base",),
        backend="local",
        files=FileLimits(max_put_bytes=1, max_get_bytes=1),
        quotas=Quotas(),
        state=StateRules(export=True, restore=True, max_bytes=1, allow_foreign=False),
        packages=packages,
        **names,
        **limits,
    )


@pytest.mark.parametrize(
    ("packages", "lines"),
    [
        (PackagesPolicy(), ["packages those of the image"]),
        (
            PackagesPolicy(allowed=("pandas>=2", "polars"), **MOST),
            [
                "packages those of the image; on request: pandas>=2, polars",
                "at most 3 in a session, 1,073,741,824 bytes",
            ],
        ),
        (
            PackagesPolicy(locked=("x==1", "y==2"), auto=True, exclude_newer_s=86_400.0, **MOST),
            [
                "packages those of the image; on request: x==1, y==2",
                "locked requesting one installs all of them",
                "auto for authorized modules that are missing",
                "at least 86,400 s old",
                "at most 3 in a session, 1,073,741,824 bytes",
            ],
        ),
    ],
)
def test_packages_are_said_in_lines(packages: PackagesPolicy, lines: list[str]) -> None:
    shown = [" ".join(line.split()) for line in policy_lines(policy(packages))]
    first = next(index for index, line in enumerate(shown) if line.startswith("packages"))
    assert shown[first : first + len(lines)] == lines
    assert shown[first + len(lines)].startswith("imports")
