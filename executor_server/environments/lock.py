"""Reads locks: what uv resolved, and the lock file of a policy (PEP 751). Both become the same canonical lines.

uv runs in a sandbox and reads what an index sends, so its output is hostile: a line that could make the second uv
install something else, such as an URL, an option or a path, must not pass. So only one form is read, and what is given
to uv later is written from what was read.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

MAX_LOCK_BYTES = 8 * 2**20
"""One package with wheels for every platform takes 10 kB."""
MAX_PINS = 2000
_MAX_HASHES = 1000  # one version has wheels for every platform and Python
_MAX_MARKER_CHARS = 1000

_NAME = r"[a-z0-9]+(?:-[a-z0-9]+)*"
_VERSION = r"[0-9][0-9a-z.!+]{0,127}"
_MARKER_TEXT = r"[A-Za-z0-9_.,'\"<>=!~() *+-]+"
_LINE = re.compile(
    rf"(?P<name>{_NAME})==(?P<version>{_VERSION})(?: ; (?P<marker>{_MARKER_TEXT}?))?"
    r"(?P<hashes>(?: --hash=sha256:[0-9a-f]{64})+)"
)
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class LockError(ValueError):
    """A text is no lock that we take. The message is a clause for a client: "pandas has no wheel with a SHA-256"."""


@dataclass(frozen=True, order=True)
class Pin:
    """One version of one distribution, by the hashes of files of which one is installed."""

    name: str  # normalized
    version: str
    marker: str  # empty: always
    hashes: tuple[str, ...]  # sorted; SHA-256 in hex

    @property
    def line(self) -> str:
        """The requirement as uv reads it."""
        condition = f" ; {self.marker}" if self.marker else ""
        return f"{self.name}=={self.version}{condition} " + " ".join(f"--hash=sha256:{each}" for each in self.hashes)

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def canonical(pins: Iterable[Pin]) -> str:
    """Returns the text of a lock: one line for each pin, sorted."""
    return "".join(f"{pin.line}\n" for pin in sorted(pins))


def read_requirements(text: str) -> tuple[Pin, ...]:
    """Reads what `uv pip compile --generate-hashes` prints. Raises LockError."""
    _check_size(text)
    joined = re.sub(r" *\\\n *", " ", text)
    return _checked(_read_line(line) for line in joined.splitlines() if line)


def _read_line(line: str) -> Pin:
    match = _LINE.fullmatch(line)
    if match is None:
        raise LockError("the resolved packages have a line of another form than name, version and hashes")
    hashes = _HASH.findall(match["hashes"])
    return _pin(match["name"], match["version"], (match["marker"] or "").strip(), hashes)


def read_lock_file(text: str) -> tuple[Pin, ...]:
    """Reads a pylock.toml: only versions that have wheels with hashes; where it says to get them from is ignored.

    Raises LockError.
    """
    _check_size(text)
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise LockError("it is no TOML") from error
    if not str(found.get("lock-version", "")).startswith("1."):
        raise LockError('its lock-version is not "1.0"')
    packages = found.get("packages")
    if not isinstance(packages, list):
        raise LockError("it has no packages")
    return _checked(_read_package(package) for package in packages)


def _read_package(package: Any) -> Pin:
    name = package.get("name") if isinstance(package, dict) else None
    if not isinstance(name, str) or not re.fullmatch(_NAME, canonicalize_name(name)):
        raise LockError("a package has no name")
    name = canonicalize_name(name)
    version, marker = package.get("version"), package.get("marker", "")
    if not isinstance(version, str) or not re.fullmatch(_VERSION, version):
        raise LockError(f"{name} has no version")
    if not isinstance(marker, str) or (marker and not re.fullmatch(_MARKER_TEXT, marker)):
        raise LockError(f"{name} has a marker that is not understood")
    if "extras" in marker or "dependency_groups" in marker:
        raise LockError(f"{name} is for extras or dependency groups, which are not supported")
    wheels = package.get("wheels")
    hashes = [_digest_of(wheel) for wheel in wheels] if isinstance(wheels, list) else []
    if not hashes or "" in hashes:
        raise LockError(f"{name} has no wheels with SHA-256 hashes")
    return _pin(name, version, marker, hashes)


def _digest_of(wheel: Any) -> str:
    hashes = wheel.get("hashes") if isinstance(wheel, dict) else None
    digest = hashes.get("sha256") if isinstance(hashes, dict) else None
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else ""


def _pin(name: str, version: str, marker: str, hashes: Sequence[str]) -> Pin:
    if len(hashes) > _MAX_HASHES or len(marker) > _MAX_MARKER_CHARS:
        raise LockError(f"{name} has more files, or a longer marker, than is taken")
    return Pin(name, version, marker, tuple(sorted(set(hashes))))


def _check_size(text: str) -> None:
    if len(text) > MAX_LOCK_BYTES:
        raise LockError(f"it is longer than {MAX_LOCK_BYTES:,} characters")


def _checked(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    """Returns the pins, sorted. A name may come twice only where markers say which of them counts."""
    listed: dict[str, list[Pin]] = {}
    for count, pin in enumerate(pins, 1):
        if count > MAX_PINS:
            raise LockError(f"it has more than {MAX_PINS:,} packages")
        listed.setdefault(pin.name, []).append(pin)
    for name, versions in listed.items():
        if len(versions) > 1 and not all(pin.marker for pin in versions):
            raise LockError(f"{name} has several versions")
    return tuple(sorted(pin for versions in listed.values() for pin in versions))


def names_of(requirements: Iterable[str]) -> tuple[str, ...]:
    """Returns the normalized names of requirements that the policy approved, which are canonical PEP 508."""
    found: Mapping[str, None] = dict.fromkeys(
        canonicalize_name(match[0]) for each in requirements if (match := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", each))
    )
    return tuple(found)
