"""Runs the tests of the smolagents integration on each smolagents that it is for: `make test-matrix`.

    python tools/smolagents_matrix.py [VERSION ...] [--pytest='ARGS']

The versions run one after another, because the tests measure time. matrix_runs.py says where environments and logs are.
Fails when any test failed, or a version ran none.
"""

from __future__ import annotations

import sys

from matrix_runs import PACKAGES, Trial, try_versions

VERSIONS = ("1.22.0", "1.23.0", "1.24.0", "1.25.0", "1.26.0")
SUITE = ("tests/integration/test_smolagents*.py", "tests/integration/test_examples.py", "tests/features/test_*.py")
# The table of features: only our own columns, which hold for every version, and on one backend.
SELECTION = ("-k", "not the_feature_is or ours_local")


def trial(version: str) -> Trial:
    packages = (*PACKAGES, "--group", "mcp-tools", f"smolagents=={version}")
    return Trial(version, packages, {"smolagents": version})


if __name__ == "__main__":
    sys.exit(try_versions(__doc__ or "", "smolagents", VERSIONS, trial, SUITE, SELECTION))
