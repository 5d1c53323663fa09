"""Reads TOML files of settings: small regular files, if required not writable by other users."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor_server.core.config.file_rights import untrusted
from executor_server.core.config.key_types import ConfigError

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16

# tomllib takes quadratic time for a dotted key. A match begins at the start of a part, so this takes linear time.
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{256}}")


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Returns the tables of a TOML file that no other user could write. Raises ConfigError, naming the `kind`."""
    return parse_toml(read_trusted(path, kind), f"{kind} {path}")


def parse_toml(data: bytes, file: str) -> dict[str, Any]:
    """Returns the tables in the bytes of a file, which problems call `file`. Raises ConfigError."""
    try:
        text = data.decode("utf-8")
        if _LONG_KEY.search(text) is not None:
            raise ConfigError([f"The {file} is nested too deeply."])
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError([f"The {file} is nested too deeply."]) from error
    except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
        raise ConfigError([f"The {file} is not TOML: {error}."]) from error
    if _is_deeper(tables, MAX_DEPTH):
        raise ConfigError([f"The {file} is nested too deeply."])
    return tables


def read_trusted(path: Path, kind: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Returns the bytes of a file of settings. Raises ConfigError when another user could have written it."""
    return read_bytes(path, kind, is_trusted=True, max_bytes=max_bytes)


def read_bytes(path: Path, kind: str, *, is_trusted: bool = False, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Returns the bytes of a file of settings, at most `max_bytes`. Raises ConfigError. Never waits for a FIFO."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError([f"The {kind} {path} is not a regular file."])
            # The rights of the open file are checked, since its name could lead to another file a moment later.
            if is_trusted and (why := untrusted(descriptor, path)) is not None:
                raise ConfigError([f"The {kind} {path} {why}"])
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError([f"The {kind} {path} can't be read: {error.strerror}."]) from error
    if len(data) > max_bytes:
        raise ConfigError([f"The {kind} {path} is larger than {max_bytes:,} bytes."])
    return data


def _is_deeper(tables: Mapping[str, Any], levels: int) -> bool:
    """True when tables and arrays are nested deeper. Not recursive: dotted keys reach deeper than our stack."""
    level: list[Any] = [tables]
    for _ in range(levels):
        level = [
            value
            for table in level
            for value in (table.values() if isinstance(table, dict) else table)
            if isinstance(value, (dict, list))
        ]
        if not level:
            return False
    return True
