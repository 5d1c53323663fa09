"""Each peer's environment: `.cache/peers/NAME`, made by uv from the versions that peers.toml pins."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.references import Unmeasurable

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).parent / "peers.toml"
DRIVERS = Path(__file__).parent / "drivers"

_CACHE = ROOT / ".cache" / "peers"
_INSTALL_TIMEOUT_S = 600.0
_TAIL_CHARS = 400


@dataclass(frozen=True)
class Peer:
    """One row of the table."""

    name: str
    title: str
    isolates: str
    beside: str
    """The name of our peer whose figures its own are divided by."""
    driver: str = ""
    arguments: tuple[str, ...] = ()
    requirements: tuple[str, ...] = ()
    main: str = ""
    """The package whose version stands for the peer's."""
    image: str = ""
    unavailable: str = ""
    """The reason why there is nothing to measure."""

    @property
    def is_ours(self) -> bool:
        return not self.requirements and not self.unavailable


@dataclass(frozen=True)
class Catalogue:
    day: date
    peers: tuple[Peer, ...] = field(default_factory=tuple)


def read_catalogue(path: Path = CATALOGUE) -> Catalogue:
    read = tomllib.loads(path.read_text())
    day = read.pop("day")
    return Catalogue(day, tuple(_peer(name, table) for name, table in read.items()))


def _peer(name: str, table: Mapping[str, Any]) -> Peer:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Peer(name, **fields)


def python_of(peer: Peer) -> Path:
    """The interpreter of its environment, made when it is missing or of other versions. Raises Unmeasurable."""
    if peer.is_ours:
        return Path(sys.executable)
    directory = _CACHE / peer.name
    mark = directory / ".made-of"
    made_of = hashlib.sha256("\n".join(peer.requirements).encode()).hexdigest()
    if not mark.exists() or mark.read_text() != made_of:
        shutil.rmtree(directory, ignore_errors=True)
        print(f"installing {peer.title}", file=sys.stderr, flush=True)
        base: str = sys._base_executable  # type: ignore[attr-defined]  # not the venv's own link
        _uv("venv", "--quiet", "--python", base, str(directory))
        python = str(directory / "bin/python")
        _uv("pip", "install", "--quiet", "--compile-bytecode", "--python", python, *peer.requirements)
        mark.write_text(made_of)
    return directory / "bin/python"


def version_of(peer: Peer) -> str:
    """Returns the version in its environment."""
    if not peer.main or peer.unavailable:
        return ""
    program = f"from importlib.metadata import version; print(version({peer.main!r}))"
    return subprocess.run(
        [_CACHE / peer.name / "bin/python", "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def _uv(*arguments: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "uv", *arguments],
            env={**os.environ, "UV_SYSTEM_CERTS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unmeasurable(f"its packages took more than {_INSTALL_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        raise Unmeasurable(f"its packages can't be had: {' '.join(done.stderr.split())[-_TAIL_CHARS:]}")
