"""Locks, and how they are read: PEP 751, from a policy's lock file and from uv.

uv runs in a sandbox and reads an index's data, so its output is hostile: nothing may pass that makes the second uv
install something else, such as an option or a path. So each value is matched with its pattern, and the lines for uv are
written from the parsed values.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.utils import canonicalize_name

MAX_LOCK_BYTES = 4 * 2**20
"""One package with wheels for every platform takes 10 kB; of those that uv prints, most take 0.4 kB."""
MAX_PINS = 2000
_MAX_HASHES = 1000  # one version has wheels for every platform and Python
_MAX_MARKER_CHARS = 1000
# Outside of quotes, uv prints dots only in times. A limit on a line limits the parts of a dotted key.
_MAX_DOTS_IN_LINE = 64

_ID_CHARS = 32  # 128 bits of a hash: two locks with one id can't be found

_NAME = r"[a-z0-9]+(?:-[a-z0-9]+)*"
_VERSION = r"[0-9][0-9a-z.!+]{0,127}"
_MARKER_TEXT = r"[A-Za-z0-9_.,'\"<>=!~() *+-]+"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[!-~]{1,2000}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+!-]{1,240}\.whl")


# Each match ends with its line at the latest and never fails, so that hostile quotes take linear time.
_QUOTED = re.compile(r"""\"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?""")


class LockError(ValueError):
    """A text is not an acceptable lock. The message is a clause for a client: "pandas has no wheel with a SHA-256"."""


@dataclass(frozen=True, order=True)
class Pin:
    """One version of one distribution, with the hashes of its files, of which one is installed."""

    name: str  # normalized
    version: str
    marker: str  # empty: always
    hashes: tuple[str, ...]  # sorted; SHA-256 in hex

    @property
    def requirement(self) -> str:
        """The requirement for uv."""
        return f"{self}{f' ; {self.marker}' if self.marker else ''}"

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, order=True)
class Wheel:
    """A file of an index for one version of a distribution."""

    name: str  # normalized
    version: str
    sha256: str  # in hex
    url: str
    file_name: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Lock:
    """Everything that determines an environment's content, in canonical form: equal requests give equal locks."""

    text: str  # requirements, one a line, sorted: `name==version` with the hash of one wheel
    interpreter: str  # its tag, such as "cpython-3.12.4"
    platform: str  # the one that the wheels are for, such as "x86_64-manylinux_2_39"
    uv_version: str
    pins: tuple[str, ...]  # sorted; `name==version` of each line

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Lock:
        """Reads a lock as `asdict` gives it. Raises KeyError, ValueError."""
        text, interpreter, platform, uv_version = (
            as_text(values[name]) for name in ("text", "interpreter", "platform", "uv_version")
        )
        return cls(text, interpreter, platform, uv_version, as_texts(values["pins"]))

    @property
    def sha256(self) -> str:
        """The digest of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def hashes(self) -> tuple[str, ...]:
        """The SHA-256 of each wheel, in hex."""
        return tuple(line.rpartition(":")[2] for line in self.text.splitlines())

    @property
    def environment_id(self) -> str:
        """The id of the environment that is built from it."""
        made_of = [self.interpreter, self.platform, self.uv_version, self.text]
        return "env-" + hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:_ID_CHARS]


def as_text(value: object) -> str:
    """Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def as_texts(value: object) -> tuple[str, ...]:
    """Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError("no list of texts")
    return tuple(map(as_text, value))


def canonical(wheels: Iterable[Wheel]) -> str:
    """Returns the text of a lock: one line for each wheel, sorted."""
    return "".join(f"{wheel} --hash=sha256:{wheel.sha256}\n" for wheel in sorted(wheels))


def read_lock_file(text: str) -> tuple[Pin, ...]:
    """Reads a pylock.toml: versions whose wheels have hashes. Its download addresses are ignored. Raises LockError."""
    return _checked(map(_read_package, _packages(text, by_uv=False)))


def read_resolved(text: str, known: Collection[str] | None = None) -> tuple[Wheel, ...]:
    """Reads the pylock.toml that uv printed for one interpreter; returns the best wheel of each package.

    uv lists all wheels that the interpreter can use. `known`: take only files with these hashes. Raises LockError.
    Blocks, for seconds with the longest texts.
    """
    packages = _packages(text, by_uv=True)
    pins = _checked(map(_read_package, packages))
    wheels = tuple(sorted(_best_wheel(package, known) for package in packages))
    if len(wheels) != len({pin.name for pin in pins}):
        raise LockError("a package has several versions")
    return wheels


def _packages(text: str, *, by_uv: bool) -> list[Any]:
    if len(text) > MAX_LOCK_BYTES:
        raise LockError(f"it is longer than {MAX_LOCK_BYTES:,} characters")
    if by_uv:
        _check_form(text)
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise LockError("it is no TOML") from error
    if not str(found.get("lock-version", "")).startswith("1."):
        raise LockError('its lock-version is not "1.0"')
    packages = found.get("packages")
    if not isinstance(packages, list):
        raise LockError("it has no packages")
    return packages


def _check_form(text: str) -> None:
    """Refuses text that uv never prints: tomllib needs the square of the parts of a key, 3 s for 32 kB of "a.a.a…"."""
    if '"""' in text or "'''" in text:  # _QUOTED is right without these only
        raise LockError("it has text of several lines, which uv never prints")
    if any(line.count(".") > _MAX_DOTS_IN_LINE for line in _QUOTED.sub("", text).split("\n")):
        raise LockError("it has a dotted key of many parts, which uv never prints")


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


def _best_wheel(package: Any, known: Collection[str] | None) -> Wheel:
    """Chooses a wheel of a package that `_read_package` accepts."""
    pin = _read_package(package)
    wheels = [_read_wheel(pin, wheel) for wheel in package["wheels"]]
    usable = [wheel for wheel in wheels if known is None or wheel.sha256 in known]
    if not usable:
        raise LockError(f"Hash mismatch for {pin}: the index has none of the files that the lock lists")
    return max(usable, key=_rank)


def _read_wheel(pin: Pin, wheel: Any) -> Wheel:
    url = wheel.get("url")
    if not isinstance(url, str) or not _URL.fullmatch(url):
        raise LockError(f"{pin.name} has a wheel without an address")
    file_name = unquote(urlsplit(url).path).rpartition("/")[2]
    if not _FILE_NAME.fullmatch(file_name) or canonicalize_name(file_name.partition("-")[0]) != pin.name:
        raise LockError(f"{pin.name} has a wheel with a name that is refused")
    return Wheel(pin.name, pin.version, _digest_of(wheel), url, file_name)


def _rank(wheel: Wheel) -> tuple[object, ...]:
    """Ranks wheels that all fit: compiled before pure Python, for this Python before its stable ABI, newest libc."""
    *_, abi, platform = ("", *wheel.file_name.removesuffix(".whl").split("-"))
    libc = max((int(minor) for minor in re.findall(r"linux_\d{1,4}_(\d{1,4})_", platform)), default=0)
    return platform != "any", abi not in ("none", "abi3"), abi == "abi3", libc, wheel.file_name


def _digest_of(wheel: Any) -> str:
    hashes = wheel.get("hashes") if isinstance(wheel, dict) else None
    digest = hashes.get("sha256") if isinstance(hashes, dict) else None
    return digest if isinstance(digest, str) and _DIGEST.fullmatch(digest) else ""


def _pin(name: str, version: str, marker: str, hashes: Sequence[str]) -> Pin:
    if len(hashes) > _MAX_HASHES or len(marker) > _MAX_MARKER_CHARS:
        raise LockError(f"{name} has more files, or a longer marker, than is taken")
    return Pin(name, version, marker, tuple(sorted(set(hashes))))


def _checked(pins: Iterable[Pin]) -> tuple[Pin, ...]:
    """Returns the pins, sorted. A name may occur twice only with markers that choose between them."""
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
    """Returns the normalized names of approved requirements, which are canonical PEP 508."""
    found: Mapping[str, None] = dict.fromkeys(
        canonicalize_name(match[0]) for each in requirements if (match := re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", each))
    )
    return tuple(found)
