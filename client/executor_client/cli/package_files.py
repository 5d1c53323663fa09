"""The packages that a file names: requirements.txt, pylock.toml (PEP 751), or the header of a script (PEP 723).

A file selects packages; the daemon's operator decides where they come from. So options about indexes, links and builds
are refused with a remedy, not ignored: the caller would think that they apply.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from executor_client.cli.script_header import read_header
from executor_client.errors import InvalidRequest

FILE_BYTES_MAX = 16 * 1024 * 1024

_PYLOCK = re.compile(r"pylock(\.[^.]+)?\.toml")
_LOCK_VERSION = re.compile(r"1\.\d+")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_HASH = re.compile(r"\s+--hash[= ]\s*\S+")
_VARIABLE = re.compile(r"\$\{[A-Z0-9_]+\}")
_NO_PACKAGE = re.compile(r"[/\\]|@|\.(whl|zip|tar\.gz|tgz)$")

_INDEX = "the daemon's operator decides where packages come from (environments.index_url)"
_ALWAYS = "this always applies; remove the line"
_REMEDIES = {
    "-r": "copy the lines of that file into this one",
    "--requirement": "copy the lines of that file into this one",
    "-c": "write the version bounds next to the packages",
    "--constraint": "write the version bounds next to the packages",
    "-e": "only packages of the index can be installed; build a wheel into it",
    "--editable": "only packages of the index can be installed; build a wheel into it",
    "-i": _INDEX,
    "--index-url": _INDEX,
    "--extra-index-url": _INDEX,
    "--no-index": _INDEX,
    "-f": _INDEX,
    "--find-links": _INDEX,
    "--trusted-host": _INDEX,
    "--only-binary": _ALWAYS,
    "--require-hashes": _ALWAYS,
    "--no-binary": "only wheels are installed; build one into the index",
    "--pre": "name the version, as in numpy==2.0.0rc1",
}
_OTHER_OPTION = "it has no effect here; remove it"


def packages_of(path: str) -> tuple[str, ...]:
    """Returns the packages that a file names, as requirements; "-" reads requirements from standard input.

    Raises InvalidRequest, with the line where there is one.
    """
    text, name = _text(path), Path(path).name
    if name.endswith(".py"):
        packages = read_header(text, path).dependencies
    elif _PYLOCK.fullmatch(name):
        packages = tuple(_locked(text, path))
    elif name.endswith(".toml"):
        raise InvalidRequest(f"{path} is not a lock file; name it pylock.toml or pylock.NAME.toml")
    else:
        packages = tuple(_required(text, path))
    if not packages:
        raise InvalidRequest(f"{path} names no packages")
    return tuple(dict.fromkeys(packages))


def _text(path: str) -> str:
    try:
        if path == "-":
            text = sys.stdin.read(FILE_BYTES_MAX + 1)
            if len(text) > FILE_BYTES_MAX:
                raise InvalidRequest(f"standard input is larger than {FILE_BYTES_MAX:,} bytes")
            return text
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InvalidRequest(f"{path} is larger than {FILE_BYTES_MAX:,} bytes")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# requirements.txt


def _required(text: str, path: str) -> Iterator[str]:
    for number, line in _joined(text):
        content = _COMMENT.sub("", line).strip()
        if content:
            yield _requirement(content, path, number)


def _joined(text: str) -> Iterator[tuple[int, str]]:
    """Yields each line with its number; a backslash at its end continues it on the next line."""
    begun = 0
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        begun = begun or number
        # A comment is never continued.
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            parts.append(line[:-1])
            continue
        yield begun, "".join([*parts, line])
        begun, parts = 0, []
    if parts:
        yield begun, "".join(parts)


def _requirement(content: str, path: str, line: int) -> str:
    if content.startswith("-"):
        _refuse_option(re.split(r"[ =]", content, maxsplit=1)[0], path, line)
    requirement = _HASH.sub("", f" {content}").strip()
    if " --" in requirement:
        option = re.split(r"[ =]", requirement.partition(" --")[2], maxsplit=1)[0]
        _refuse_option(f"--{option}", path, line)
    if _VARIABLE.search(requirement):
        raise InvalidRequest(f"{path}, line {line}: variables are not supported; write their values")
    if _NO_PACKAGE.search(requirement.partition(";")[0].rstrip()):
        raise InvalidRequest(
            f"{path}, line {line}: {requirement!r} is not a package of an index, so it can't be installed; "
            "add a wheel to the daemon's index, or copy the file into the session"
        )
    return requirement


def _refuse_option(option: str, path: str, line: int) -> NoReturn:
    if not option.startswith("--"):
        option = option[:2]  # its value may follow directly, as in -ihttps://...
    remedy = _REMEDIES.get(option, _OTHER_OPTION)
    raise InvalidRequest(f"{path}, line {line}: the option {option} can't be used: {remedy}")


# ---------------------------------------------------------------------------------------------------------------------
# pylock.toml


def _locked(text: str, path: str) -> Iterator[str]:
    try:
        lock = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}") from error
    version = lock.get("lock-version")
    if not isinstance(version, str) or not _LOCK_VERSION.fullmatch(version):
        raise InvalidRequest(f'{path}: lock-version is {version!r}; locks of version "1.0" are read')
    packages = lock.get("packages", [])
    if not isinstance(packages, list) or not all(isinstance(each, dict) for each in packages):
        raise InvalidRequest(f"{path}: packages is not a list of tables")
    for package in packages:
        yield _pin(package, path)


def _pin(package: Mapping[str, Any], path: str) -> str:
    """Returns a locked package as a requirement of this version. Its hashes are not used: the daemon checks packages
    against its own lock, or the policy's."""
    name, version, marker = (package.get(key, "") for key in ("name", "version", "marker"))
    if not all(isinstance(each, str) for each in (name, version, marker)) or not name:
        raise InvalidRequest(f"{path}: a package has no name")
    if elsewhere := [key for key in ("vcs", "directory", "archive") if key in package]:
        raise InvalidRequest(f"{path}: {name} is locked to {elsewhere[0]}; only packages of an index are installed")
    if not version:
        raise InvalidRequest(f"{path}: {name} has no version")
    if not package.get("wheels"):
        raise InvalidRequest(f"{path}: {name} {version} has no wheel, and only wheels are installed")
    if re.search(r"\b(extras|dependency_groups)\b", marker):
        raise InvalidRequest(f"{path}: {name} depends on extras or groups; export a lock without them")
    return f"{name}=={version}; {marker}" if marker else f"{name}=={version}"
