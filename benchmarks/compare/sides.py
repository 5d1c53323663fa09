"""The two sides: this working tree, and a commit that is checked out with an environment of its own.

A commit's files and environment are kept in `.cache/compare`, by its id, for the next comparison with it; only the
last few stay. An incomplete one has no mark, and is made again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from benchmarks.compare.worker import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "compare"
RECORDED = ROOT / "benchmarks" / "recorded-commit"
"""Its last line begins with the commit whose figures docs/performance.md has."""

_KEPT = 3
_COMPLETE = ".complete"
_GIT_TIMEOUT_S = 60.0
_SET_UP_TIMEOUT_S = 600.0
_TAIL_CHARS = 600


class NoSide(Exception):
    """There is no such commit here, or it can't be set up; the message says why."""


@dataclass(frozen=True)
class Side:
    name: str
    root: Path
    python: Path


def recorded_commit() -> str:
    """Raises NoSide."""
    try:
        return RECORDED.read_text().splitlines()[-1].split()[0]
    except (OSError, IndexError) as error:
        raise NoSide(f"{RECORDED.name} names no commit") from error


def working_side() -> Side:
    """This tree as it is, including uncommitted changes."""
    try:
        commit = _git("rev-parse", "--short=7", "HEAD").strip()
        changed = _git("status", "--porcelain", "--untracked-files=no").strip()
        name = f"{commit} with changes" if changed else commit
    except NoSide:
        name = "this tree"
    return Side(name, ROOT, Path(sys.executable))


def commit_side(commit: str) -> Side:
    """The files of a commit, and an environment that its own tools/setup.sh made. Raises NoSide."""
    full = resolved(commit)
    root = CACHE / full[:12]
    with _exclusive():
        if not (root / _COMPLETE).exists():
            _make(full, root)
        (root / _COMPLETE).touch()
        _drop_oldest()
    return Side(full[:7], root, root / ".venv/bin/python")


def resolved(commit: str) -> str:
    """The full id of a commit that is here. Raises NoSide."""
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}").strip()
    except NoSide as error:
        shallow = " (this clone is shallow)" if _is_shallow() else ""
        raise NoSide(f"there is no commit {commit} here{shallow}") from error


@contextmanager
def _exclusive() -> Iterator[None]:
    """One process at a time makes or removes what is in the cache; others wait for it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(commit: str, root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    print(f"setting up {commit[:7]} in {root.relative_to(ROOT)}", file=sys.stderr, flush=True)
    try:
        _check_out(commit, root)
        _set_up(root)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _check_out(commit: str, root: Path) -> None:
    # Not a git worktree: it would have to be removed from the repository again, however this ends.
    with subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        unpacked = subprocess.run(["tar", "-x", "-C", root], stdin=archive.stdout, check=False)
    if archive.returncode != 0 or unpacked.returncode != 0:
        raise NoSide(f"the files of {commit[:7]} could not be taken out of the repository")


def _set_up(root: Path) -> None:
    constraints = root / ".cache" / "constraints.txt"
    constraints.parent.mkdir(exist_ok=True)
    # Both sides get the same versions of other projects, if the commit allows it, so that only our code differs.
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in _installed()))
    environment = {**os.environ, "PYTHON": sys._base_executable, "UV_CONSTRAINT": str(constraints)}  # type: ignore[attr-defined]
    environment.pop("VIRTUAL_ENV", None)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    log = CACHE / "set-up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "tools/setup.sh"],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(_SET_UP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise NoSide(f"its set-up took more than {_SET_UP_TIMEOUT_S:.0f} s") from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    if status != 0:
        raise NoSide(f"its set-up failed: {' / '.join(log.read_text(errors='replace')[-_TAIL_CHARS:].split(chr(10)))}")


def _installed() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _drop_oldest() -> None:
    made = sorted(CACHE.glob(f"*/{_COMPLETE}"), key=lambda mark: mark.stat().st_mtime, reverse=True)
    for mark in made[_KEPT:]:
        shutil.rmtree(mark.parent, ignore_errors=True)


def _is_shallow() -> bool:
    try:
        return _git("rev-parse", "--is-shallow-repository").strip() == "true"
    except NoSide:
        return False


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoSide(f"git {arguments[0]} does not answer for this directory") from error
