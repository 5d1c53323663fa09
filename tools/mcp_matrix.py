"""Runs the tests of `executor mcp` on several versions of the official SDK: `make test-mcp-matrix`.

    python tools/mcp_matrix.py [VERSION ...] [--pytest='ARGS']

The oldest and the newest of each major version. With version 1 there is mcpadapt as well, and so smolagents' own MCP
tools. matrix_runs.py says where environments and logs are. Fails when any test failed, or a version ran none.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from matrix_runs import CACHE, Ran, Trial, report

VERSIONS = ("1.28.0", "1.30.0", "2.0.0", "2.3.0")
SUITE = (
    "tests/integration/test_mcp*.py",
    "tests/integration/test_smolagents_mcp_tools.py",
    "tests/unit/client/test_mcp*.py",
)
PACKAGES = ("--editable", ".[server,smolagents,mcp,data]", "--group", "dev")
SETTINGS = {"REQUIRED_BACKENDS": "local"}


def trial(version: str) -> Trial:
    tools = ("--group", "mcp-tools") if version.startswith("1.") else ()
    return Trial(f"mcp-{version}", (*PACKAGES, *tools, f"mcp=={version}"), {"mcp": version})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help=f"of {', '.join(VERSIONS)}")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="further arguments for pytest, as one word")
    asked = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    every: list[Ran] = []
    for version in asked.versions:
        print(f"mcp {version} ...", flush=True)
        every.append(trial(version).run(SUITE, shlex.split(asked.pytest), SETTINGS))
    return report("mcp", every)


if __name__ == "__main__":
    sys.exit(main())
