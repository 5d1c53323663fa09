"""The manifest of an environment: what it was made of and what it consists of, with checksums over both.

It has two files beside the environment's tree, where no sandbox sees them. `manifest.json` is small and is read when
the daemon starts; `files.json` lists every file with its digest, and is read when the environment is checked. The
manifest has the list's digest and a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from executor_server.environments.building import Lock
from executor_server.environments.file_list import Entry

MAX_MANIFEST_BYTES = 16 * 2**20
MAX_LIST_BYTES = 256 * 2**20

_MANIFEST = "manifest.json"
_LIST = "files.json"
_VERSION = 1


class ManifestError(Exception):
    """The manifest can't be believed; the message says why."""


@dataclass(frozen=True)
class Manifest:
    """The facts of a published environment."""

    lock: Lock
    modules: tuple[str, ...]
    pins: tuple[str, ...]
    size_bytes: int
    created_s: float  # seconds since the epoch
    requester: str  # tenant that asked first; empty: the daemon itself
    requirements: tuple[str, ...]  # the ones that were asked for first
    files_sha256: str  # digest of the list

    @property
    def environment_id(self) -> str:
        return self.lock.environment_id


def list_of(files: Mapping[str, Entry]) -> bytes:
    """Returns the content of the list of files."""
    return json.dumps({path: entry.written() for path, entry in files.items()}, separators=(",", ":")).encode()


def write_manifest(directory: Path, manifest: Manifest, listed: bytes) -> None:
    """Writes both files, so that they survive a crash of the host. Blocks. Raises OSError."""
    body = _canonical(asdict(manifest))
    written = {"version": _VERSION, "sha256": hashlib.sha256(body).hexdigest(), "environment": json.loads(body)}
    _write(directory / _LIST, listed)
    _write(directory / _MANIFEST, json.dumps(written, indent=1).encode())


def read_manifest(directory: Path) -> Manifest:
    """Reads the small file. Blocks for a moment. Raises ManifestError."""
    try:
        written = json.loads(_read(directory / _MANIFEST, MAX_MANIFEST_BYTES))
        if written["version"] != _VERSION:
            raise ManifestError(f"its manifest is of version {written['version']!r}")
        if hashlib.sha256(_canonical(written["environment"])).hexdigest() != written["sha256"]:
            raise ManifestError("its manifest does not fit its checksum")
        manifest = _manifest_from(written["environment"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ManifestError(f"its manifest can't be read: {error}") from error
    if manifest.environment_id != directory.name:
        raise ManifestError("its manifest is that of another environment")
    return manifest


def read_list(directory: Path, manifest: Manifest) -> dict[str, Entry]:
    """Reads the list of files. Blocks. Raises ManifestError."""
    try:
        listed = _read(directory / _LIST, MAX_LIST_BYTES)
        if hashlib.sha256(listed).hexdigest() != manifest.files_sha256:
            raise ManifestError("its list of files does not fit its checksum")
        return {path: Entry.read(values) for path, values in json.loads(listed).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"its list of files can't be read: {error}") from error


def lock_from(values: Mapping[str, Any]) -> Lock:
    """Reads a lock as `asdict` gives it. Raises KeyError, ValueError."""
    text, interpreter, platform, uv_version = (
        _text(values[name]) for name in ("text", "interpreter", "platform", "uv_version")
    )
    return Lock(text, interpreter, platform, uv_version, _texts(values["pins"]))


def _manifest_from(values: Mapping[str, Any]) -> Manifest:
    return Manifest(
        lock=lock_from(values["lock"]),
        modules=_texts(values["modules"]),
        pins=_texts(values["pins"]),
        size_bytes=int(values["size_bytes"]),
        created_s=float(values["created_s"]),
        requester=_text(values["requester"]),
        requirements=_texts(values["requirements"]),
        files_sha256=_text(values["files_sha256"]),
    )


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError("no list of texts")
    return tuple(_text(value) for value in values)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


def _read(path: Path, max_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError("it is too large")
    return data


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
