"""The packages of a profile in the policy file: which may be asked for, from what lock or index, and how much."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, model_validator
from pydantic_core import InitErrorDetails

from executor_server.core.config import DAY_S, GIB, MIB, Form, ReadForm, Section, WrittenSize, contradiction, refuse
from executor_server.policy.lock_file import LOCK_FORM, LockFile, read_lock
from executor_server.policy.requirement import REQUIREMENT_FORM, BadRequirement, Requirement, read_requirement

ANY_PACKAGE = "*"
"""In `allowed`: every package of the daemon's own index."""
MAX_ALLOWED = 512
MAX_IMPORTS = 256
MAX_REQUIREMENTS = 256
_MIN_ENVIRONMENT_BYTES = MIB

_AGE = re.compile(r"([1-9][0-9]{0,4})([hdw])")
_UNIT_S = {"h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}
_MAX_AGE_S = 3650 * DAY_S
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*){0,7}")
_MAX_MODULE_CHARS = 100


def age_s(text: str) -> float:
    """Returns the seconds of "36h", "14d" or "2w". Raises ValueError with a clause."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise ValueError("is not an age")
    seconds = int(match[1]) * _UNIT_S[match[2]]
    if seconds > _MAX_AGE_S:
        raise ValueError("is more than ten years")
    return seconds


def _age(text: str) -> str:
    age_s(text)
    return text


def _allowed(text: str) -> str:
    if text == ANY_PACKAGE:
        return text
    found = read_requirement(text)
    if found.marker:
        raise BadRequirement("has a marker; bounds hold everywhere")
    if found.versions.is_unsatisfiable():
        raise BadRequirement("has bounds that exclude every version")
    return found.text


def _distribution(text: str) -> str:
    found = read_requirement(text)
    if found.text != found.name:
        raise BadRequirement("has more than a name")
    return found.name


def _lock(value: object) -> LockFile:
    if not isinstance(value, str | Path):
        raise ValueError("is not text")
    return read_lock(Path(value))


def _is_module(text: str) -> bool:
    return len(text) <= _MAX_MODULE_CHARS and _MODULE.fullmatch(text) is not None


_ALLOWED_FORM = ReadForm(f'{REQUIREMENT_FORM}, or "*"', _allowed)
_AGE_FORM = ReadForm('an age such as "36h", "14d" or "2w"', _age)
_MODULE_FORM = Form("the dotted name of a module", _is_module)
_DISTRIBUTION_FORM = ReadForm('the name of a package, such as "scikit-learn"', _distribution)
_WHEELS_FORM = Form(
    "true: a source distribution runs its own code while it is built; build a wheel of it into an index of your own",
    lambda value: value is True,
)

AllowedPackage = Annotated[str, AfterValidator(_ALLOWED_FORM)]
Age = Annotated[str, AfterValidator(_AGE_FORM)]
# Written as a path; dumps, fingerprints and comparisons have the path and the digest.
Lock = Annotated[
    LockFile,
    PlainValidator(ReadForm(LOCK_FORM, _lock)),
    PlainSerializer(lambda lock: f"{lock.path} sha256:{lock.sha256}", return_type=str),
]


class PackagesTable(Section):
    """Packages that sessions may have besides those of their image. The daemon makes an environment of them once, and
    every session that asks for the same ones sees it. Without `allowed` and `lock`, none may be asked for."""

    allowed: Annotated[tuple[AllowedPackage, ...], Field(max_length=MAX_ALLOWED)] = ()
    """Packages that may be asked for, by name, each once, with bounds of their versions and the extras that may be
    asked for. What these packages depend on comes with them. `"*"` stands for every other package of the index, and
    counts only where the daemon has an index of its own (`environments.index_url`)."""
    ask: Annotated[tuple[AllowedPackage, ...], Field(max_length=MAX_ALLOWED)] = ()
    """Packages that a session may have after an approval (docs/approvals.md), written as in `allowed`. In both lists,
    `"*"` does not stand for packages that either list names."""
    auto: Annotated[bool, Field(strict=True)] = False
    """True adds to a session the packages of modules that it authorizes and its image lacks, among those that may be
    asked for."""
    lock: Lock | None = None
    """A lock file, instead of `allowed`: its packages may be asked for, in its versions, and nothing is resolved. It is
    read together with the policy, and must not be writable by other users."""
    exclude_newer: Age | None = None
    """The age below which files of the index don't count: harmful releases are often found in their first days. Has no
    effect with `lock`. Not set: all count."""
    wheels_only: Annotated[Any, AfterValidator(_WHEELS_FORM)] = True
    """True: wheels are installed, and never a source distribution."""
    max_requirements: Annotated[int, Field(strict=True, gt=0, le=MAX_REQUIREMENTS)] = 64
    """Packages that one session may ask for by name."""
    max_environment_bytes: Annotated[int, WrittenSize, Field(strict=True, ge=_MIN_ENVIRONMENT_BYTES, lt=2**63)] = (
        4 * GIB
    )
    """Bytes of the files of one environment."""
    imports: Annotated[
        dict[Annotated[str, AfterValidator(_MODULE_FORM)], Annotated[str, AfterValidator(_DISTRIBUTION_FORM)]],
        Field(max_length=MAX_IMPORTS),
    ] = Field(default_factory=dict)
    """The packages that `auto` adds for modules, by the names of the modules: for modules that the built-in table does
    not know, or for which it names another package."""

    @property
    def has_packages(self) -> bool:
        """True when sessions can ask for some at all."""
        return bool(self.allowed or self.ask) or self.lock is not None

    @property
    def exclude_newer_s(self) -> float | None:
        """Seconds before now; files that the index got later don't count."""
        return None if self.exclude_newer is None else age_s(self.exclude_newer)

    @cached_property
    def bounds(self) -> dict[str, Requirement]:
        """The bounds of each package that is named. Kept, since each request needs them."""
        return _bounds(self.allowed)

    @cached_property
    def ask_bounds(self) -> dict[str, Requirement]:
        """Likewise of packages that need an approval."""
        return _bounds(self.ask)

    @property
    def allows_any(self) -> bool:
        """True when packages that are not named may be asked for, given an index for that."""
        return ANY_PACKAGE in self.allowed

    @property
    def asks_any(self) -> bool:
        """Likewise after an approval."""
        return ANY_PACKAGE in self.ask

    @model_validator(mode="after")
    def _check(self) -> PackagesTable:
        refuse(self, list(self._contradictions()))
        return self

    def _contradictions(self) -> Iterator[InitErrorDetails]:
        seen: set[str] = set()
        for key in ("allowed", "ask"):
            if self.lock is not None and getattr(self, key):
                text = (
                    f"can't be combined with `{key}`: the lock already lists what may be requested; remove one of them"
                )
                yield contradiction(("lock",), text, str(self.lock.path), also=[(key,)])
            for index, text in enumerate(getattr(self, key)):
                name = text if text == ANY_PACKAGE else read_requirement(text).name
                if name in seen:
                    yield contradiction((key, index), f"allows {name} twice; write its bounds in one entry", text)
                seen.add(name)


def _bounds(texts: tuple[str, ...]) -> dict[str, Requirement]:
    found = [read_requirement(text) for text in texts if text != ANY_PACKAGE]
    return {each.name: each for each in found}
