"""Decides which secret a request gets, by its method and path, and refuses ambiguous paths.

The server decides what a path means, and this process must come to the same result before it adds a credential. Servers
differ in how often they decode a path, whether they do so before they resolve `..`, and which characters they take for
a slash. So an ambiguous path is refused wherever paths matter, and otherwise passed on unchanged: a normalised path
would be one more reading.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from urllib.parse import unquote_to_bytes

from executor_server.guest.egress.host_rules import METHODS_WITHOUT_SECRETS, SecretRule

_SIGN = re.compile(rb"[^a-z0-9]")
_ESCAPE = re.compile(rb"%[0-9A-Fa-f]{2}")
# Headers by which some servers and frameworks replace the method or path of the request line.
_METHOD_OVERRIDES = {b"x-http-method", b"x-http-method-override", b"x-method-override"}
_PATH_OVERRIDES = {b"x-original-url", b"x-rewrite-url", b"x-original-uri"}


class Ambiguous(Exception):
    """A request is ambiguous; the message is a clause with the reason."""


def secrets_for(
    rules: Sequence[SecretRule], method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> list[SecretRule]:
    """Returns the secrets that a request gets: for each header the first rule that covers it.

    `target` is in origin form or `*`; names of `headers` are in lower case. Raises Ambiguous.
    """
    with_paths = any(rule.paths for rule in rules)
    path = plain_path(target) if with_paths else ""
    chosen: dict[str, SecretRule] = {}
    for rule in rules:
        if rule.header.lower() not in chosen and _covers(rule, method.decode("ascii"), path):
            chosen[rule.header.lower()] = rule
    for rule in chosen.values():
        _check_overrides(rule, headers)
    return list(chosen.values())


def _covers(rule: SecretRule, method: str, path: str) -> bool:
    if rule.methods and method not in rule.methods:
        return False
    if _gets_no_secret(method):
        return False
    if not rule.paths:
        return True
    if not path.startswith("/"):  # `*`, which asks about the server as a whole
        return False
    if not any(_matches(pattern, path) for pattern in rule.paths):
        # A server that drops matrix parameters or empty segments may read a covered path: then there are two readings.
        # If neither reading is covered, the request goes on without a secret.
        if any(_matches(pattern, _reduced(path)) for pattern in rule.paths):
            raise Ambiguous("has empty segments or parameters (`;`), which servers read in different ways")
        return False
    if _reduced(path) != path:
        raise Ambiguous("has empty segments or parameters (`;`), which servers read in different ways")
    return True


def _matches(pattern: str, path: str) -> bool:
    """A pattern that ends in `*` covers longer paths that begin with the part before it."""
    if pattern.endswith("*"):
        return path.startswith(pattern[:-1]) and len(path) > len(pattern) - 1
    return path == pattern


def _reduced(path: str) -> str:
    """Returns the path without parameters and empty segments, as some servers read it."""
    *above, last = [segment.partition(";")[0] for segment in path.split("/")]
    return "/" + "".join(f"{segment}/" for segment in above if segment) + last


def plain_path(target: bytes) -> str:
    """Returns the path of a request's target, decoded once. Raises Ambiguous if that is not the only reading."""
    raw = target.partition(b"?")[0]
    if b"#" in raw:
        raise Ambiguous("has a fragment")
    if b"\\" in raw:
        raise Ambiguous("has a backslash, which some servers take for a slash")
    if len(_ESCAPE.findall(raw)) != raw.count(b"%"):
        raise Ambiguous("has a % that begins no escape")
    decoded = unquote_to_bytes(raw)
    if decoded.count(b"/") != raw.count(b"/") or b"\\" in decoded:
        raise Ambiguous("has an encoded slash or backslash")
    if _ESCAPE.search(decoded):
        raise Ambiguous("is encoded twice")
    try:
        path = decoded.decode("utf-8")
    except UnicodeDecodeError:
        raise Ambiguous("is not UTF-8") from None
    if unicodedata.normalize("NFKC", path) != path:
        raise Ambiguous("has characters that some servers replace by others, as a full-width dot by a dot")
    if not path.isprintable():
        raise Ambiguous("has control characters or separators")
    if any(segment.partition(";")[0].strip() in (".", "..") for segment in path.split("/")):
        raise Ambiguous("has segments that are . or ..")
    return path


def _check_overrides(rule: SecretRule, headers: Iterable[tuple[bytes, bytes]]) -> None:
    for name, value in headers:
        folded = _folded(name)
        changes_method = bool(rule.methods) or _gets_no_secret(value.decode("latin-1"))
        if (folded in _METHOD_OVERRIDES and changes_method) or (folded in _PATH_OVERRIDES and rule.paths):
            raise Ambiguous(f"has the header {folded.decode('ascii')}, which may change what the request asks for")


def _gets_no_secret(method: str) -> bool:
    """True in any spelling, since some servers ignore the case of a method."""
    return method.strip().upper() in METHODS_WITHOUT_SECRETS


def is_spelling_of(name: bytes, header: str) -> bool:
    """True for each name that a server might take for the header: CGI replaces other signs by `_`."""
    return _folded(name) == _folded(header.encode("ascii"))


def _folded(name: bytes) -> bytes:
    return _SIGN.sub(b"-", name.lower())
