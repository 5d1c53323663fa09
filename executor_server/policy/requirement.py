"""Requirements of packages, as clients and policies write them: "name[extras] specifiers; marker" of PEP 508.

A requirement is hostile text. Its length and its characters are checked before `packaging` reads it. It is refused,
with a clause that says why, if it names no package of the index (an address, a path, an option of pip), or if readers
differ about its meaning. An accepted requirement has one canonical form, and reading that gives the same form again.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace

from packaging.markers import Marker
from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as ParsedRequirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

REQUIREMENT_FORM = 'a package by name, such as "pandas", "pandas>=2,<3" or "pandas[excel]>=2"'
MAX_REQUIREMENT_CHARS = 256
MAX_NAME_CHARS = 100
MAX_EXTRAS = 16
MAX_MARKERS = 16
"""Different markers in one request."""

_OPTION = re.compile(r"(?:^| )-{1,2}[A-Za-z]")
_FILE = re.compile(r"\.(?:whl|zip|tgz|tar(?:\.[a-z0-9]+)?|txt|toml|in)$", re.IGNORECASE)
_NAME_END = re.compile(r"[\[(<>=!~; ]")
_MARKER = re.compile(r"[A-Za-z0-9_.<>=!~()'\" -]*")
_MAX_PARENTHESES = 8  # each level is one of packaging's recursion
# Unknown before the sandbox exists, or meaningful in the metadata of packages only.
_UNDECIDED = re.compile(r"\b(?:platform_release|platform_version|implementation_version|extras?|dependency_groups)\b")
_A_SANDBOX = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.12.0",
    "python_version": "3.12",
    "sys_platform": "linux",
}


class BadRequirement(ValueError):
    """A text is no requirement that could be granted. Its message is a clause: "is an address, …"."""


@dataclass(frozen=True)
class Requirement:
    """A requirement in canonical form."""

    name: str  # by PEP 503
    extras: tuple[str, ...] = ()  # by PEP 685, sorted
    specifiers: tuple[str, ...] = ()  # "<3", ">=2", sorted
    marker: str = ""

    @property
    def text(self) -> str:
        """The requirement as PEP 508 has it."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        marker = f"; {self.marker}" if self.marker else ""
        return f"{self.name}{extras}{','.join(self.specifiers)}{marker}"

    @functools.cached_property
    def versions(self) -> SpecifierSet:
        """The versions that it admits."""
        return SpecifierSet(",".join(self.specifiers))

    def within(self, extras: Iterable[str], specifiers: Iterable[str]) -> Requirement:
        """Returns the requirement with more extras, and held to more bounds."""
        return replace(
            self,
            extras=tuple(sorted({*self.extras, *extras})),
            specifiers=tuple(sorted({*self.specifiers, *specifiers})),
        )

    def is_within(self, bound: Requirement) -> bool:
        """True when every version and every extra that it admits is one of `bound`."""
        return set(self.extras) <= set(bound.extras) and self.versions.is_subset(bound.versions)


@functools.lru_cache(maxsize=1024)
def read_requirement(text: str) -> Requirement:
    """Reads one requirement, as a client or a policy wrote it. Raises BadRequirement, and nothing else."""
    return _read(text, MAX_REQUIREMENT_CHARS)


@functools.lru_cache(maxsize=1024)
def read_granted(text: str) -> Requirement:
    """Reads a requirement with the bounds of a policy added. Raises BadRequirement."""
    return _read(text, 2 * MAX_REQUIREMENT_CHARS)


def _read(text: str, max_chars: int) -> Requirement:
    _check_text(text, max_chars)
    try:
        parsed = ParsedRequirement(text)
    except InvalidRequirement as error:
        reason = str(error).partition("\n")[0]
        raise BadRequirement(f"can't be read: {reason}") from error
    if len(parsed.name) > MAX_NAME_CHARS:
        raise BadRequirement(f"has a name of more than {MAX_NAME_CHARS} characters")
    if len(parsed.extras) > MAX_EXTRAS:
        raise BadRequirement(f"has more than {MAX_EXTRAS} extras")
    found = Requirement(
        name=canonicalize_name(parsed.name),
        extras=tuple(sorted({canonicalize_name(extra) for extra in parsed.extras})),
        specifiers=tuple(sorted({_specifier_text(each) for each in parsed.specifier})),
        marker=_marker_text(parsed.marker),
    )
    if len(found.text) > max_chars:  # a version or a marker can have a longer canonical form
        raise BadRequirement(f"is longer than {max_chars} characters in canonical form")
    return found


def merged(requirements: Iterable[Requirement]) -> tuple[Requirement, ...]:
    """Returns the requirements sorted, with one for each package and marker: it has the extras and bounds of all.

    Bounds that exclude each other stay together; the resolver explains them. Raises BadRequirement.
    """
    found: dict[tuple[str, str], Requirement] = {}
    for each in requirements:
        same = found.get((each.name, each.marker), each)
        found[each.name, each.marker] = both = same.within(each.extras, each.specifiers)
        if len(both.text) > MAX_REQUIREMENT_CHARS:
            raise BadRequirement(f"ask for {each.name} with too many bounds")
    return tuple(sorted(found.values(), key=lambda each: each.text))


def _check_text(text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise BadRequirement(f"is longer than {max_chars} characters")
    if not text.strip():
        raise BadRequirement("is empty")
    foreign = next((char for char in text if not " " <= char <= "~"), None)
    if foreign is not None:
        what = f"U+{ord(foreign):04X} {unicodedata.name(foreign, '')}".rstrip()
        raise BadRequirement(f"has the character {what}; names are ASCII, and each package is an entry of its own")
    if _OPTION.search(text) is not None:
        raise BadRequirement("is an option; options of pip or uv can't be given")
    if "@" in text or "://" in text:
        raise BadRequirement("is a URL, but packages come from the daemon's index only")
    name = _NAME_END.split(text.strip(), maxsplit=1)[0]
    if text.lstrip().startswith((".", "~")) or "/" in text or "\\" in text or _FILE.search(name) is not None:
        raise BadRequirement("is a path, but packages come from the daemon's index only")
    if "===" in text:
        raise BadRequirement('has "===", which compares texts; "==" compares versions')
    if text.count("(") > _MAX_PARENTHESES:
        raise BadRequirement("has too many parentheses")


def _specifier_text(specifier: Specifier) -> str:
    """The specifier with its version in canonical form."""
    written, star, _ = specifier.version.partition(".*")
    version = Version(written)
    if version.local is not None and specifier.operator != "==":
        raise BadRequirement(f'has the local version {version}, which only "==" can name')
    return f"{specifier.operator}{version}{star}"


# ---------------------------------------------------------------------------------------------------------------------
# Markers


def _marker_text(marker: Marker | None) -> str:
    """The marker in canonical form.

    Whether it holds is for the resolver, which knows the sandbox's Python. One evaluation finds comparisons that are
    undefined; trying every Python in which it could hold would take a request 0.3 s of the daemon's only loop.
    """
    if marker is None:
        return ""
    text = str(marker)
    if _MARKER.fullmatch(text) is None:
        raise BadRequirement("has a marker with invalid characters")
    unknown = _UNDECIDED.search(text)
    if unknown is not None:
        raise BadRequirement(f"has a marker about {unknown.group()}, which is unknown before the sandbox is made")
    try:
        marker.evaluate(_A_SANDBOX, context="requirement")
    except (KeyError, ValueError) as error:
        raise BadRequirement("has a marker that compares what can't be compared") from error
    return text
