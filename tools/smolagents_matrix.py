"""Runs the tests of the smolagents integration on each smolagents that it is for: `make test-matrix`.

    python tools/smolagents_matrix.py [VERSION ...] [--pytest='ARGS']

Each version has an environment of its own below .cache/matrix, made at its first run and again when pyproject.toml has
changed; all of them import this checkout. One version after the other: the tests measure time. What pytest said is in
the .log beside the environment. Fails when any test failed, or a version ran none.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "matrix"

VERSIONS = ("1.22.0", "1.23.0", "1.24.0", "1.25.0", "1.26.0")
SUITE = ("tests/integration/test_smolagents*.py", "tests/integration/test_examples.py", "tests/features/test_*.py")
# Of the table of features our own columns hold for every version, and one backend's is enough to see that.
SELECTION = "not the_feature_is or ours_local"
# smolagents' MCP tools can't do with the `mcp` of our own extra, which is no part of the suite.
PACKAGES = ("--editable", ".[server,smolagents,data]", "--group", "dev", "mcp<2")
NAMES_SHOWN_MAX = 20


class MatrixFailure(Exception):
    """A version can't be tried; the message says why."""


@dataclass(frozen=True)
class Ran:
    """How the suite went on one version."""

    version: str
    passed: int
    failed: Sequence[str]
    skipped: int
    seconds: float
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.failed and self.passed > 0


def run(version: str, arguments: Sequence[str]) -> Ran:
    began = time.monotonic()
    try:
        python = environment(version)
        report, log = CACHE / f"{version}.xml", CACHE / f"{version}.log"
        report.unlink(missing_ok=True)
        suite = [str(path.relative_to(ROOT)) for pattern in SUITE for path in sorted(ROOT.glob(pattern))]
        # Without its cache: one directory would be that of every version, and of a developer's own runs.
        command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "-k", SELECTION, f"--junitxml={report}"]
        command += [*suite, *arguments]
        # A version that skips what it was to be tried with has shown nothing; see tests/support/backends.py.
        settings = {"REQUIRED_BACKENDS": "local", **os.environ}
        with log.open("wb") as output:
            done = subprocess.run(command, cwd=ROOT, env=settings, stdout=output, stderr=subprocess.STDOUT, check=False)
        return _read(version, report, log, done.returncode, time.monotonic() - began)
    except MatrixFailure as failure:
        return Ran(version, 0, (), 0, time.monotonic() - began, str(failure))


def environment(version: str) -> Path:
    """The interpreter of the version's environment, which is made when there is none for what pyproject.toml says."""
    folder = CACHE / version
    python, stamp = folder / "bin" / "python", folder / ".made-for"
    key = hashlib.sha256(f"{sys.version} {PACKAGES}".encode() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not (stamp.exists() and stamp.read_text() == key):
        base: str = sys._base_executable  # type: ignore[attr-defined]  # what this environment was made from
        _uv("venv", "--quiet", "--clear", "--python", base, str(folder))
        _uv("pip", "install", "--quiet", "--python", str(python), *PACKAGES, f"smolagents[mcp]=={version}")
        stamp.write_text(key)
    asked = subprocess.run(
        [python, "-c", "import smolagents; print(smolagents.__version__)"], capture_output=True, text=True, check=False
    )
    if asked.stdout.strip() != version:
        raise MatrixFailure(f"its environment has {asked.stdout.strip() or asked.stderr.strip()[-500:]!r} instead")
    return python


def _uv(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "uv", *arguments],
        cwd=ROOT,
        env={"UV_SYSTEM_CERTS": "1", **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise MatrixFailure(f"uv {arguments[0]} failed:\n{done.stdout[-2_000:]}")


def _read(version: str, report: Path, log: Path, status: int, seconds: float) -> Ran:
    """pytest's own report. A test can have two entries: one for itself, one for an error when it was cleared up."""
    if not report.exists():
        raise MatrixFailure(f"pytest ended with status {status} and no report; see {log.relative_to(ROOT)}")
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    # More than the tests can be wrong: something was left over when all of them were done.
    problem = f"pytest ended with status {status}; see {log.relative_to(ROOT)}" if status and not failed else ""
    return Ran(version, passed, failed, skipped, seconds, problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help=f"of {', '.join(VERSIONS)}")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="further arguments for pytest, as one word")
    asked = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    every: list[Ran] = []
    for version in asked.versions:
        print(f"smolagents {version} ...", flush=True)
        every.append(run(version, shlex.split(asked.pytest)))
    print(f"\n{'smolagents':12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for each in every:
        print(f"{each.version:12}{each.passed:8}{len(each.failed):8}{each.skipped:9}{each.seconds:9.0f}")
    for each in every:
        for name in each.failed[:NAMES_SHOWN_MAX]:
            print(f"{each.version}: failed: {name}")
        if (unnamed := len(each.failed) - NAMES_SHOWN_MAX) > 0:
            print(f"{each.version}: and {unnamed} more, see .cache/matrix/{each.version}.log")
        if each.problem:
            print(f"{each.version}: {each.problem}")
    return 0 if all(each.is_good for each in every) else 1


if __name__ == "__main__":
    sys.exit(main())
