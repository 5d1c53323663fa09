"""Other CPythons on this machine: those of pyenv, else those on the PATH."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.rounds import usual

VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
"""The versions that the guest runs on."""
TRIED = usual(VERSIONS, but=VERSIONS[1:-1])
"""Those that a test tries: the oldest and the newest, unless it is to try them all."""


def pythons() -> dict[str, Path]:
    """Returns the interpreters that this machine has, by their versions."""
    return {version: python for version in VERSIONS if (python := find_python(version)) is not None}


def find_python(version: str) -> Path | None:
    """An interpreter of this version ("3.9"); None when there is none. Shims of pyenv are no proof of one."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    if installed:
        return installed[-1]
    found = shutil.which(f"python{version}")
    return Path(found) if found and "shims" not in Path(found).parts else None


def require_python(version: str) -> Path:
    """The same; skips the test when there is none."""
    python = find_python(version)
    if python is None:
        pytest.skip(f"there is no CPython {version} on this machine")
    return python
