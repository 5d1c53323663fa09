"""Goods of the world's sites, made on the spot: pure-Python wheels, and git repositories."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import zipfile
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


def make_wheel(project: str, version: str, source: str, *, requires: tuple[str, ...] = ()) -> tuple[str, bytes]:
    """The name and content of a wheel with one module, which has the project's name."""
    info = f"{project}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    files = {
        f"{project}.py": source,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(text.encode())}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return f"{project}-{version}-py3-none-any.whl", packed.getvalue()


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
