"""Compares what was installed with what its packages list themselves: the hashes in their RECORD files.

uv checks a wheel when it unpacks it into its cache, and believes the cache from then on. A file that a disk has lost or
changed there would get into each environment that is made later, and be listed in its manifest as it is. Two packages
that bring one file overwrite each other without a word, in no certain order.

uv writes the lists, of what hostile wheels had in theirs: nothing is opened here by a path of one. Files with no
SHA-256 hash, and files that no package lists, have nothing to be compared with.
"""

from __future__ import annotations

import base64
import csv
import io
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from executor_server.core import SandboxFailure
from executor_server.environments.file_list import Digest
from executor_server.environments.tree import TreeRefused, opened_directory

MAX_LISTS_BYTES = 64 * 2**20
"""Bytes of all lists of an environment. That of PyTorch has 2 MB."""
_LIST = "RECORD"
_SUFFIX = ".dist-info"
_ALGORITHM = "sha256="
_MAX_SHOWN_CHARS = 200


class FilesDamaged(SandboxFailure):
    """Files are not what their own package says. The message is a clause for a client."""

    def __init__(self, message: str, infos: tuple[str, ...]) -> None:
        """`infos` are the directories of the packages' metadata: "numpy-2.4.6.dist-info"."""
        super().__init__(message)
        self.infos = infos


@dataclass(frozen=True)
class _Owner:
    info: str
    hash: str


def check_recorded(site_fd: int, infos: list[str], digests: Mapping[str, Digest]) -> None:
    """Compares the files of an environment, by their digests, with the lists of its packages, `infos`.

    Blocks. Raises TreeRefused when two packages have different contents for one file, FilesDamaged when a file is not
    what its package says or is missing, OSError.
    """
    owners: dict[str, _Owner] = {}
    damaged: dict[str, str] = {}  # the first path of each package
    left_bytes = MAX_LISTS_BYTES
    for info in sorted(infos):
        own = f"{info}/{_LIST}"
        text = _read_list(site_fd, info, left_bytes) if own in digests else b""
        left_bytes -= len(text)
        is_whole = False
        for path, listed in _rows(text):
            is_whole = is_whole or path == own
            if not listed.startswith(_ALGORITHM):
                continue
            digest = digests.get(path)
            if digest is None:
                if _is_within(path) and not path.endswith(".pyc"):
                    damaged.setdefault(info, path)
                continue
            owner = owners.setdefault(path, _Owner(info, listed))
            if owner.info != info and owner.hash != listed:
                raise TreeRefused(
                    f"two of its packages, {_shown(owner.info)} and {_shown(info)}, have the file {_cut(path)} with "
                    "different contents: ask for one of them"
                )
            if _hash_of(digest) != listed:
                damaged.setdefault(info, path)
        if not is_whole:
            damaged.setdefault(info, own)
    if damaged:
        info, path = next(iter(damaged.items()))
        raise FilesDamaged(f"{_cut(path)} is not the file that {_shown(info)} lists", tuple(damaged))


def _read_list(site_fd: int, info: str, max_bytes: int) -> bytes:
    with opened_directory(info, site_fd) as directory:
        fd = os.open(_LIST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(fd, "rb") as file:
            text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise TreeRefused(f"its lists of files have more than {MAX_LISTS_BYTES:,} bytes")
    return text


def _rows(text: bytes) -> Iterator[tuple[str, str]]:
    """Yields paths and hashes, up to the first row that is none."""
    try:
        for row in csv.reader(io.StringIO(text.decode("utf-8", "replace"), newline="")):
            if len(row) >= 2:
                yield row[0], row[1]
    except csv.Error:
        return


def _hash_of(digest: Digest) -> str:
    return _ALGORITHM + base64.urlsafe_b64encode(bytes.fromhex(digest.sha256)).rstrip(b"=").decode()


def _is_within(path: str) -> bool:
    """True for a path below the directory of the list; some lead to files that are installed elsewhere."""
    return not path.startswith("/") and ".." not in path.split("/")


def _shown(info: str) -> str:
    """Returns "numpy 2.4.6"."""
    return info.removesuffix(_SUFFIX).replace("-", " ", 1)[:_MAX_SHOWN_CHARS]


def _cut(path: str) -> str:
    return repr(path[:_MAX_SHOWN_CHARS])
