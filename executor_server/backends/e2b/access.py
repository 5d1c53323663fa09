"""Access to the account: reads the API key, which no other user may be able to read, and loads the SDK."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from executor_api.tokens import can_be_sent
from executor_server.core import SandboxFailure
from executor_server.core.config import E2BSection

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Cloud

KEY_VARIABLE = "E2B_API_KEY"
E2B_REQUEST_TIMEOUT_S = 30.0
CONCURRENCY = 8  # requests to the cloud at a time

_MAX_KEY_BYTES = 4096


def open_cloud(section: E2BSection) -> Cloud:
    """Prepares requests to the cloud, without sending any. Raises SandboxFailure, which says what is missing."""
    try:
        # Imported here: a daemon without sandboxes in the cloud needs neither the SDK nor the half second to load it.
        from executor_server.backends.e2b.cloud import Access, Cloud, missing_options
    except ModuleNotFoundError as error:
        raise SandboxFailure(
            f"the SDK of E2B is not installed (no module {error.name}): pip install 'remote-executor[e2b]'"
        ) from error
    if missing := missing_options():
        raise SandboxFailure(
            f"the SDK of E2B that is installed is too old: it has no {', '.join(missing)}. Install another one: "
            "pip install 'remote-executor[e2b]'"
        )
    access = Access(
        api_key=read_key(section.api_key_file),
        api_url=section.api_url,
        sandbox_url=section.sandbox_url,
        request_timeout_s=E2B_REQUEST_TIMEOUT_S,
        concurrency=CONCURRENCY,
    )
    return Cloud(access)


def read_key(path: Path | None) -> str:
    """Reads the key from the file, or without one from the environment. Raises SandboxFailure with the remedy."""
    if path is None:
        text, source = os.environ.get(KEY_VARIABLE, "").strip(), f"the environment variable {KEY_VARIABLE}"
        if not text:
            raise SandboxFailure(
                f"there is no API key of E2B: set {KEY_VARIABLE} for the daemon, or name a file that holds the key in "
                "e2b.api_key_file"
            )
    else:
        text, source = _read_private(path), f"the file {path} (e2b.api_key_file)"
    if not text or not can_be_sent(text):
        raise SandboxFailure(f"{source} holds no API key: one line of ASCII without blanks")
    return text


def _read_private(path: Path) -> str:
    try:
        # O_NONBLOCK: a named pipe at this path must not hang the daemon.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:  # without the path, which may be the key itself
        raise SandboxFailure(f"the file of e2b.api_key_file can't be read: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise SandboxFailure(f"the file {path} (e2b.api_key_file) is not a regular file")
        if found.st_mode & 0o077:
            raise SandboxFailure(f"the file {path} (e2b.api_key_file) can be used by others; run: chmod 600 {path}")
        return os.read(fd, _MAX_KEY_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise SandboxFailure(f"the file {path} (e2b.api_key_file) can't be read: {error.strerror}") from error
    finally:
        os.close(fd)
