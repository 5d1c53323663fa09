"""Goods of the world's sites, made on the spot: git repositories."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_GIT_TIMEOUT_S = 60.0
_NOBODYS_CONFIGURATION = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_AUTHOR_NAME": "Tests",
    "GIT_AUTHOR_EMAIL": "tests@test-internet.example",
    "GIT_COMMITTER_NAME": "Tests",
    "GIT_COMMITTER_EMAIL": "tests@test-internet.example",
}


def make_repository(directory: Path, files: Mapping[str, str]) -> str:
    """Makes a bare repository with one commit of these files on its branch `main`; returns the commit's hash."""
    work = directory.with_suffix(".work")
    work.mkdir(parents=True)
    for name, text in files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    _git(work, "init", "--quiet", "--initial-branch=main")
    _git(work, "add", ".")
    _git(work, "commit", "--quiet", "--message", "First")
    _git(work, "clone", "--quiet", "--bare", ".", str(directory))
    return _git(work, "rev-parse", "HEAD")


def _git(directory: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words],
        cwd=directory,
        env={**os.environ, **_NOBODYS_CONFIGURATION},
        capture_output=True,
        text=True,
        timeout=_GIT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
