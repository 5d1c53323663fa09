"""Checks the form of single fields: identifiers, names, paths, source text, sizes.

Each check returns the value it was given, or raises an InvalidRequest with the field and the allowed form.
The layers below decide what a field means and whether it is granted.
"""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Mapping, Sequence

from executor_api.limits import (
    CODE_BYTES_MAX,
    EXCLUDED_BYTES_MAX,
    EXCLUDED_MAX,
    IDENTIFIER_CHARS_MAX,
    PATH_BYTES_MAX,
    SAVEPOINT_NUMBER_MAX,
    SESSION_NAME_CHARS_MAX,
)
from executor_server.core import (
    ENVIRONMENT_BYTES_MAX,
    ENVIRONMENT_VARIABLES_MAX,
    InvalidRequest,
    Reason,
    ResourceExhausted,
)
from executor_server.core.config import is_name

_MODE_MAX = 0o777
_FILE_BYTES_MAX = 2**63 - 1

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SESSION_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{SESSION_NAME_CHARS_MAX - 1}}}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_LEASE_ID = re.compile(r"[0-9a-f]{32}")


def invalid(field: str, problem: str, reason: Reason = Reason.INVALID_FIELD) -> InvalidRequest:
    return InvalidRequest(reason, f"{field} {problem}", field)


def identifier(text: str, field: str) -> str:
    """Checks an id that the daemon or the caller chose."""
    if not _ID.fullmatch(text):
        raise invalid(field, "must be 1 to 64 of A-Z a-z 0-9 _ -")
    return text


def session_name(text: str) -> str:
    """Checks the name of a session."""
    if not _SESSION_NAME.fullmatch(text):
        raise invalid(
            "name", f"must be 1 to {SESSION_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return text


def lease_id(text: str) -> str:
    """Checks the id of a lease: 128 random bits, so that two clients never choose the same."""
    if not _LEASE_ID.fullmatch(text):
        raise invalid("lease_id", "must be 32 of 0-9 a-f, chosen at random")
    return text


def python_name(text: str, field: str) -> str:
    """Checks a name that agent code can write: an identifier, but no keyword and no __name__ of Python's own."""
    # CPython normalizes identifiers when it compiles; a name of another form could be set but never read. The length
    # comes first: normalizing 40,000 combining characters takes three seconds, and twice as many four times as long.
    if len(text) > IDENTIFIER_CHARS_MAX or not text.isidentifier() or unicodedata.normalize("NFKC", text) != text:
        raise invalid(field, f"must be a Python identifier of at most {IDENTIFIER_CHARS_MAX} characters")
    if keyword.iskeyword(text):
        raise invalid(field, f"is a Python keyword: {text}")
    if text.startswith("__") and text.endswith("__"):
        raise invalid(field, f"is reserved by Python (__x__): {text}")
    return text


def module_name(text: str, field: str) -> str:
    """Checks the dotted name of a module."""
    if len(text) > IDENTIFIER_CHARS_MAX or not all(part.isidentifier() for part in text.split(".")):
        raise invalid(field, f"must be dotted module names of at most {IDENTIFIER_CHARS_MAX} characters")
    return text


def environment(variables: Mapping[str, str], field: str) -> dict[str, str]:
    """Checks environment variables: their names, their number, their size."""
    if len(variables) > ENVIRONMENT_VARIABLES_MAX:
        raise invalid(field, f"has more than {ENVIRONMENT_VARIABLES_MAX} variables")
    for name, value in variables.items():
        if not _VARIABLE.fullmatch(name):
            raise invalid(field, f"has an invalid name: {name[:64]!r}; use A-Z a-z 0-9 _, not starting with a digit")
        if "\0" in value:
            raise invalid(f"{field}.{name}", "holds a NUL character")
    if sum(len(name.encode()) + len(value.encode()) for name, value in variables.items()) > ENVIRONMENT_BYTES_MAX:
        raise invalid(field, f"is larger than {ENVIRONMENT_BYTES_MAX:,} bytes")
    return dict(variables)


def source(code: str, field: str) -> str:
    if len(code.encode()) > CODE_BYTES_MAX:
        raise invalid(field, f"is larger than {CODE_BYTES_MAX:,} bytes")
    if "\0" in code:
        raise invalid(field, "holds a NUL character")
    return code


def tenant_or_all(name: str) -> str:
    """Checks the name of a tenant; empty stands for all tenants."""
    if name and not is_name(name):
        raise invalid("tenant", "is not a valid tenant name")
    return name


def path(text: str, field: str, *, may_be_empty: bool = False) -> str:
    """Checks the text of a path in a sandbox, absolute or relative to the workspace. The guest resolves it."""
    if not (text or may_be_empty):
        raise invalid(field, "must not be empty", Reason.PATH_REFUSED)
    if "\0" in text or len(text.encode()) > PATH_BYTES_MAX:
        raise invalid(field, f"must have no NUL and at most {PATH_BYTES_MAX} bytes", Reason.PATH_REFUSED)
    return text


def file_mode(mode: int) -> int:
    if mode > _MODE_MAX:
        raise invalid("mode", "must be from 0 to 0o777")
    return mode


def file_bytes(number: int, field: str) -> int:
    """Checks an offset in a file, or a length."""
    if number > _FILE_BYTES_MAX:
        raise invalid(field, "must be below 2**63")
    return number


def excluded(paths: Sequence[str]) -> Sequence[str]:
    """Checks the names and paths that an archive leaves out."""
    count(len(paths), EXCLUDED_MAX, "excluded")
    if sum(len(each.encode()) for each in paths) > EXCLUDED_BYTES_MAX:
        raise invalid("excluded", f"is larger than {EXCLUDED_BYTES_MAX:,} bytes")
    return [path(each, "excluded").rstrip("/") for each in paths]


def count(number: int, most: int, field: str) -> None:
    if number > most:
        raise invalid(field, f"has {number} entries; at most {most:,} are allowed")


def branch(in_branch: bool, *, savepoint: bool) -> bool:
    if in_branch and savepoint:
        raise invalid("branch", "takes no savepoint: the session stays as it is; leave savepoint out")
    return in_branch


def savepoint(number: int, field: str) -> int:
    if number > SAVEPOINT_NUMBER_MAX:
        raise invalid(field, "is not a savepoint number; use 0 for the newest")
    return number


def size(size_bytes: int, most: int, what: str) -> int:
    if size_bytes > most:
        raise ResourceExhausted(Reason.TOO_LARGE, f"{what} of {size_bytes:,} bytes is over the limit of {most:,}")
    return size_bytes


def distinct(names: list[str], field: str) -> None:
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(field, f"names {twice} twice")
