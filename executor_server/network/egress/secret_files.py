"""Opens the files of secrets for the proxy, which reads them; the daemon never has their content.

A user who can read a secret's file has the secret, and a user who can write it can replace it. So a file is used only
if its owner is root or the daemon's user, and no other user can read or write it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

MAX_SECRET_FILE_BYTES = 16_384


class BadSecretFile(Exception):
    """The message is a sentence that names the key, the file if there is one, and what to do."""


@contextlib.contextmanager
def open_secrets(files: Mapping[str, Path]) -> Iterator[tuple[dict[str, int], list[str]]]:
    """Opens all files; yields the descriptors of usable ones, and a sentence about each of the others."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, int] = {}
        problems: list[str] = []
        for name, path in files.items():
            try:
                opened[name] = _open(name, path)
                stack.callback(os.close, opened[name])
            except BadSecretFile as error:
                problems.append(str(error))
        yield opened, problems


def _open(name: str, path: Path) -> int:
    """Returns a descriptor for reading. The rights are those of the open file: its name could lead elsewhere later."""
    # Without a path that leads to no file: it may be the secret itself, and problems go to the log.
    key = f"The file of egress.secrets.{name}"
    if not path.is_absolute():
        raise BadSecretFile(f"{key} must be named by its absolute path.")
    try:
        # O_NONBLOCK: a named pipe must not hang the daemon. Links are followed, since secrets that are mounted into
        # containers are links; what matters is who can read and write the target.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise BadSecretFile(f"{key} can't be read: {error.strerror}.") from error
    try:
        _check(os.fstat(fd), f"The file {path} of egress.secrets.{name}", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(found: os.stat_result, file: str, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadSecretFile(f"{file} is not a regular file; write the secret into one.")
    if found.st_uid not in (os.geteuid(), 0):
        raise BadSecretFile(
            f"{file} belongs to user {found.st_uid}, not to this one or to root; run: chown {os.geteuid()} {path}"
        )
    if found.st_mode & 0o077:
        raise BadSecretFile(
            f"{file} can be used by other users, who may have read the secret; replace the secret, and run: "
            f"chmod 600 {path}"
        )
    if found.st_size > MAX_SECRET_FILE_BYTES:
        raise BadSecretFile(f"{file} is larger than {MAX_SECRET_FILE_BYTES:,} bytes; it must hold one line.")
