"""Finds packages of an image that each sandbox would compile for itself.

A sandbox sees its image read-only, so a package that was installed without bytecode is compiled again whenever it is
imported: for pandas that takes seconds. pip compiles the packages that it installs; uv does with --compile-bytecode.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_ENTRIES = 20_000
"""Entries of one directory that are examined; an environment has a few hundred."""


@dataclass(frozen=True)
class Uncompiled:
    """Packages of one directory that have no bytecode, and the number of all its packages."""

    directory: Path
    packages: tuple[str, ...]
    total: int


def find_uncompiled(directories: Iterable[Path], version: tuple[int, int]) -> list[Uncompiled]:
    """Looks for bytecode of the top module of each package, for an interpreter of this version."""
    suffix = f".cpython-{version[0]}{version[1]}.pyc"
    found: list[Uncompiled] = []
    for directory in dict.fromkeys(directories):
        packages = _packages(directory)
        missing = [name for name in packages if not (directory / name / "__pycache__" / f"__init__{suffix}").exists()]
        if missing:
            found.append(Uncompiled(directory, tuple(missing), len(packages)))
    return found


def _packages(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for _, entry in zip(range(MAX_ENTRIES), entries, strict=False) if entry.is_dir()]
    except OSError:  # not every directory that an interpreter names exists
        return []
    return sorted(name for name in names if name.isidentifier() and _has_code(directory / name / "__init__.py"))


def _has_code(file: Path) -> bool:
    """False for an empty file, which compiles in no time."""
    try:
        return file.stat().st_size > 0
    except OSError:
        return False
