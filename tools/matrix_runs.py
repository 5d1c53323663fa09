"""Shared by the matrices: creates an environment for each set of packages, and runs a suite of tests in it.

Environments are below .cache/matrix, created at their first run and again when pyproject.toml has changed; all of them
import this checkout. pytest's output is in the .log beside the environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "matrix"

NAMES_SHOWN_MAX = 20

PACKAGES = ("--editable", ".[server,smolagents,mcp,data,otel]", "--group", "dev")
# A version that skips the tests that it was to be tried with has shown nothing; see tests/support/backends.py.
SETTINGS = {"REQUIRED_BACKENDS": "local"}


class MatrixFailure(Exception):
    """A set of packages can't be tried; the message says why."""


@dataclass(frozen=True)
class Ran:
    """The results of the suite with one set of packages."""

    name: str
    passed: int
    failed: Sequence[str]
    skipped: int
    seconds: float
    problem: str = ""

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.failed and self.passed > 0


@dataclass(frozen=True)
class Trial:
    """One set of packages: its name below .cache/matrix, arguments for uv, and the versions that must be installed."""

    name: str
    packages: Sequence[str]
    versions: Mapping[str, str]  # by distribution

    def run(self, suite: Sequence[str], arguments: Sequence[str], settings: Mapping[str, str], part: str = "") -> Ran:
        """Runs the suite in the environment: `suite` holds patterns of paths in the checkout, `part` names its log."""
        began = time.monotonic()
        try:
            python = self._environment()
            report, log = CACHE / f"{self.name}{part}.xml", CACHE / f"{self.name}{part}.log"
            report.unlink(missing_ok=True)
            files = [str(path.relative_to(ROOT)) for pattern in suite for path in sorted(ROOT.glob(pattern))]
            if not files:
                raise MatrixFailure(f"there is no {' or '.join(suite)}")
            # Without pytest's cache, which all versions and a developer's own runs would share.
            command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
            with log.open("wb") as output:
                done = subprocess.run(
                    [*command, *arguments],
                    cwd=ROOT,
                    env={**settings, **os.environ},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            return self._read(report, log, done.returncode, time.monotonic() - began)
        except MatrixFailure as failure:
            return Ran(self.name, 0, (), 0, time.monotonic() - began, str(failure))

    def _environment(self) -> Path:
        """Returns the environment's interpreter. Creates the environment if none matches pyproject.toml."""
        folder = CACHE / self.name
        python, stamp = folder / "bin" / "python", folder / ".made-for"
        wanted = f"{sys.version} {tuple(self.packages)}".encode() + (ROOT / "pyproject.toml").read_bytes()
        key = hashlib.sha256(wanted).hexdigest()
        if not (stamp.exists() and stamp.read_text() == key):
            base: str = sys._base_executable  # type: ignore[attr-defined]  # the Python below this environment
            _uv("venv", "--quiet", "--clear", "--python", base, str(folder))
            _uv("pip", "install", "--quiet", "--python", str(python), *self.packages)
            stamp.write_text(key)
        for distribution, version in self.versions.items():
            ask = f"import importlib.metadata; print(importlib.metadata.version({distribution!r}))"
            asked = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
            if asked.stdout.strip() != version:
                said = asked.stdout.strip() or asked.stderr.strip()[-500:]
                raise MatrixFailure(f"its environment has {distribution} {said!r} instead of {version}")
        return python

    def _read(self, report: Path, log: Path, status: int, seconds: float) -> Ran:
        """Reads pytest's report. A test can have two entries: one for itself, one for an error in its teardown."""
        if not report.exists():
            raise MatrixFailure(f"pytest ended with status {status} and no report; see {log.relative_to(ROOT)}")
        passed, skipped, failed = set[str](), set[str](), dict[str, None]()
        for case in ElementTree.parse(report).iter("testcase"):
            name, kinds = f"{case.get('classname')}::{case.get('name')}", {child.tag for child in case}
            if kinds & {"failure", "error"}:
                failed[name] = None
            else:
                (skipped if "skipped" in kinds else passed).add(name)
        # pytest can fail although all tests passed: something was left over at the end.
        problem = f"pytest ended with status {status}; see {log.relative_to(ROOT)}" if status and not failed else ""
        return Ran(self.name, len(passed - failed.keys()), tuple(failed), len(skipped), seconds, problem)


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


def report(title: str, every: Sequence[Ran]) -> int:
    """Prints a table of all results, and the failures. Returns the exit status of the tool."""
    width = max(12, *(len(each.name) + 2 for each in every)) if every else 12
    print(f"\n{title:{width}}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for each in every:
        print(f"{each.name:{width}}{each.passed:8}{len(each.failed):8}{each.skipped:9}{each.seconds:9.0f}")
    for each in every:
        for name in each.failed[:NAMES_SHOWN_MAX]:
            print(f"{each.name}: failed: {name}")
        if (unnamed := len(each.failed) - NAMES_SHOWN_MAX) > 0:
            print(f"{each.name}: and {unnamed} more, see its log in .cache/matrix")
        if each.problem:
            print(f"{each.name}: {each.problem}")
    return 0 if all(each.is_good for each in every) else 1


def try_versions(
    doc: str,
    distribution: str,
    versions: Sequence[str],
    trial: Callable[[str], Trial],
    suite: Sequence[str],
    arguments: Sequence[str] = (),
) -> int:
    """Runs the suite with each version that the command line names, by default all. Returns the exit status."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=versions, metavar="VERSION", help=f"of {', '.join(versions)}")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="further arguments for pytest, as one word")
    asked = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    every: list[Ran] = []
    for version in asked.versions:
        print(f"{distribution} {version} ...", flush=True)
        every.append(trial(version).run(suite, [*arguments, *shlex.split(asked.pytest)], SETTINGS))
    return report(distribution, every)
