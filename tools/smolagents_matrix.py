"""Runs the tests of the smolagents integration on each smolagents that it is for: `make test-matrix`.

    python tools/smolagents_matrix.py [VERSION ...] [--pytest='ARGS']

One version after the other: the tests measure time. matrix_runs.py says where environments and logs are. Fails when any
test failed, or a version ran none.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from matrix_runs import CACHE, Ran, Trial, report

VERSIONS = ("1.22.0", "1.23.0", "1.24.0", "1.25.0", "1.26.0")
SUITE = ("tests/integration/test_smolagents*.py", "tests/integration/test_examples.py", "tests/features/test_*.py")
# Of the table of features our own columns hold for every version, and one backend's is enough to see that.
SELECTION = "not the_feature_is or ours_local"
PACKAGES = ("--editable", ".[server,smolagents,mcp,data]", "--group", "dev", "--group", "mcp-tools")
# A version that skips what it was to be tried with has shown nothing; see tests/support/backends.py.
SETTINGS = {"REQUIRED_BACKENDS": "local"}


def trial(version: str) -> Trial:
    return Trial(version, (*PACKAGES, f"smolagents=={version}"), {"smolagents": version})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help=f"of {', '.join(VERSIONS)}")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="further arguments for pytest, as one word")
    asked = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    every: list[Ran] = []
    for version in asked.versions:
        print(f"smolagents {version} ...", flush=True)
        every.append(trial(version).run(SUITE, ["-k", SELECTION, *shlex.split(asked.pytest)], SETTINGS))
    return report("smolagents", every)


if __name__ == "__main__":
    sys.exit(main())
