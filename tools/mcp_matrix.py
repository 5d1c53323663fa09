"""Runs the tests of `executor mcp` on several versions of the official SDK: `make test-mcp-matrix`.

    python tools/mcp_matrix.py [VERSION ...] [--pytest='ARGS']

The oldest and the newest of each major version. Only version 1 works with mcpadapt, and so with smolagents' own MCP
tools. matrix_runs.py says where environments and logs are. Fails when any test failed, or a version ran none.
"""

from __future__ import annotations

import sys

from matrix_runs import PACKAGES, Trial, try_versions

VERSIONS = ("1.28.0", "1.30.0", "2.0.0", "2.3.0")
SUITE = (
    "tests/integration/test_mcp*.py",
    "tests/integration/test_smolagents_mcp_tools.py",
    "tests/unit/client/test_mcp*.py",
)


def trial(version: str) -> Trial:
    tools = ("--group", "mcp-tools") if version.startswith("1.") else ()
    return Trial(f"mcp-{version}", (*PACKAGES, *tools, f"mcp=={version}"), {"mcp": version})


if __name__ == "__main__":
    sys.exit(try_versions(__doc__ or "", "mcp", VERSIONS, trial, SUITE))
