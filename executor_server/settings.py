"""What the configuration and the policy file have in common: reading TOML, the forms of values, sentences of problems.

A file is checked as a whole: every problem is one sentence with the path of its key and what would be allowed there. A
key that is not known is a problem too, since it would be a wish that is not obeyed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from executor_api.sizes import bytes_of
from executor_server.file_rights import untrusted
from executor_server.import_patterns import PATTERN_FORM, is_pattern

MAX_FILE_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_PROBLEMS = 200

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
DAY_S = 86_400.0

_IMAGE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_FORM = "1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or a digit"
IMAGE_NAME_FORM = "1 to 64 of a-z 0-9 . _ -, beginning with a letter or a digit"

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY_PART = re.compile(r'[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"')
# tomllib takes quadratic time for a dotted key. A match begins where no part is under way, so that this takes linear.
_PART = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{256}}")
_CONTRADICTION = "contradiction"
_IN_TOML = {
    "missing": "is missing",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be an array",
    "too_short": "must have an entry",
}
_MAX_ROUNDS = 5
_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_NAMES = 20
_MAX_SHOWN_NUMBER = 10**30

KeyPath = tuple[int | str, ...]
"""Where a key is: the tables that lead to it, and its own name."""

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(Exception):
    """A file of settings can't be used. `problems` holds one sentence for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Section(BaseModel):
    """A table of settings: frozen, and without keys that nobody knows."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


# ---------------------------------------------------------------------------------------------------------------------
# Forms


def is_name(text: str) -> bool:
    """Whether a tenant, a profile or a token may be called this."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class Form:
    """What a text has to look like; a validator that can say what it asks for, to whom it refuses and in the docs."""

    text: str
    is_right: Callable[[Any], bool]

    def __call__(self, value: Any) -> Any:
        if not self.is_right(value):
            raise ValueError(f"must be {self.text}")
        return value


BackendName = Literal["local", "docker", "e2b"]


def each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    """For a list whose order means something. Raises ValueError."""
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise ValueError(f"lists {twice[0]!r} twice")
    return names


def _size(value: object) -> object:
    return bytes_of(value) if isinstance(value, str) else value


Count = Annotated[int, Field(strict=True, gt=0, lt=2**63)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
WrittenSize = BeforeValidator(_size)
"""Lets a number of bytes be written as "8GB" or "512MiB"."""
Bytes = Annotated[int, WrittenSize, Field(strict=True, gt=0, lt=2**63)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=365 * DAY_S, allow_inf_nan=False)]
Name = Annotated[str, AfterValidator(Form(NAME_FORM, is_name))]
ImportPattern = Annotated[str, AfterValidator(Form(PATTERN_FORM, is_pattern))]
ImageName = Annotated[str, AfterValidator(Form(IMAGE_NAME_FORM, lambda text: _IMAGE_NAME.fullmatch(text) is not None))]
AbsolutePath = Annotated[
    Path, AfterValidator(Form("an absolute path", lambda path: path.is_absolute() and "\0" not in str(path)))
]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The tables of a TOML file that nobody else could have written. Raises ConfigError, which calls it a `kind`."""
    return parse_toml(read_trusted(path, kind), f"{kind} {path}")


def parse_toml(data: bytes, file: str) -> dict[str, Any]:
    """The tables in the bytes of what is called `file`. Raises ConfigError."""
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


def read_trusted(path: Path, kind: str) -> bytes:
    """Return the bytes of a file of settings to be obeyed. Raises ConfigError where others could have written it."""
    return read_bytes(path, kind, is_trusted=True)


def read_bytes(path: Path, kind: str, *, is_trusted: bool = False) -> bytes:
    """What is in a file of settings, which is small. Raises ConfigError. Does not wait for what a FIFO may bring."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError([f"The {kind} {path} is not a regular file."])
            # The open file is looked at, so that nobody can exchange it after the look.
            if is_trusted and (why := untrusted(descriptor, path)) is not None:
                raise ConfigError([f"The {kind} {path} {why}"])
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError([f"The {kind} {path} can't be read: {error.strerror}."]) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError([f"The {kind} {path} is larger than {MAX_FILE_BYTES:,} bytes."])
    return data


def _is_deeper(tables: Mapping[str, Any], levels: int) -> bool:
    """Not recursive: dotted keys nest deeper than our stack."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@dataclass(frozen=True)
class Problem:
    """One thing to mend: the path of its key, and what is allowed there."""

    path: KeyPath
    text: str
    also: tuple[KeyPath, ...] = ()  # other keys that it is about: mending one of them would do too

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


def validated(model: type[Model], tables: Mapping[str, Any]) -> Model:
    """The settings in these tables. Raises ConfigError with every problem."""
    settings, problems = examined(model, tables)
    if settings is None:
        raise config_error(problems)
    return settings


def config_error(problems: Sequence[Problem]) -> ConfigError:
    listed = [str(problem) for problem in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(listed)
    return ConfigError([*listed, f"and {left:,} more"] if left else listed)


def examined(model: type[Model], tables: Mapping[str, Any]) -> tuple[Model | None, list[Problem]]:
    """The settings in these tables, or every problem.

    Values that contradict each other are only compared once each is right by itself. So that they are all found at
    once, what is wrong is taken out, and the rest is looked at again.
    """
    problems: list[Problem] = []
    taken_out: set[KeyPath] = set()
    for _ in range(_MAX_ROUNDS):
        try:
            settings = model.model_validate(tables)
        except ValidationError as error:
            found = [_problem(model, details) for details in error.errors()]
        else:
            return (None if problems else settings), problems
        around = {path[:depth] for path in taken_out for depth in range(len(path))}
        problems += [problem for problem in found if not _is_aftermath(problem, taken_out, around)]
        tables, removed = _without(tables, found)
        if not removed:
            break
        taken_out |= removed
    return None, problems


def contradiction(path: KeyPath, text: str, value: object, *, also: Sequence[KeyPath] = ()) -> InitErrorDetails:
    """A problem for `refuse`. The paths are relative to the table whose validator found it."""
    context = {"text": text, "depth": len(path), "also": tuple(also)}
    return InitErrorDetails(type=PydanticCustomError(_CONTRADICTION, "{text}", context), loc=path, input=value)


def refuse(model: BaseModel, contradictions: Sequence[InitErrorDetails]) -> None:
    """For the validator of a table: raises all of them, each with a path of its own."""
    if contradictions:
        raise ValidationError.from_exception_data(type(model).__name__, list(contradictions))


def dotted(path: KeyPath) -> str:
    """A path as TOML would write it: `images."a.b"`."""
    parts = [cut(str(part)) for part in path]
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in parts)


def undotted(path: str) -> KeyPath:
    """The parts of what `dotted` made."""
    return tuple(json.loads(part) if part.startswith('"') else part for part in _KEY_PART.findall(path))


def cut(text: str) -> str:
    """A text of the file for a sentence."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def some_of(names: Collection[str]) -> str:
    """Names for a sentence, of which there may be many."""
    shown = ", ".join(itertools.islice(names, _MAX_SHOWN_NAMES))
    return shown if len(names) <= _MAX_SHOWN_NAMES else f"{shown} and {len(names) - _MAX_SHOWN_NAMES:,} more"


def _problem(model: type[BaseModel], details: ErrorDetails) -> Problem:
    path = details["loc"]
    if details["type"] == "extra_forbidden":
        return Problem(path, f"no such key; there are {', '.join(_model_at(model, path[:-1]).model_fields)}")
    if path and path[-1] == "[key]":  # pydantic's way to say that it is not about the entry, but about its name
        path = path[:-1]
    message = _IN_TOML.get(details["type"]) or details["msg"].removeprefix("Value error, ").removeprefix(
        "Input should be "
    )
    value = details["input"]
    shown = "" if isinstance(value, (dict, BaseModel)) else f" (it is {_shown(value)})"
    if details["type"] != _CONTRADICTION:
        return Problem(path, f"{message}{shown}")
    context = details["ctx"]
    table = path[: len(path) - context["depth"]]
    return Problem(path, f"{context['text']}{shown}", tuple((*table, *each) for each in context["also"]))


def _is_aftermath(problem: Problem, taken_out: Set[KeyPath], around: Set[KeyPath]) -> bool:
    """Whether a problem may only be there because of what was taken out, of it or around it: that has been told of."""
    return any(
        path in around or any(path[:depth] in taken_out for depth in range(1, len(path) + 1))
        for path in (problem.path, *problem.also)
    )


def _without(tables: Mapping[str, Any], problems: Sequence[Problem]) -> tuple[dict[str, Any], set[KeyPath]]:
    """The tables without what the problems are about, and the paths that are gone."""
    rest = _copied(tables)
    removed = set()
    for problem in problems:
        removed |= {_taken_out(rest, path) for path in (problem.path, *problem.also)}
    return rest, removed - {()}


def _taken_out(tables: dict[str, Any], path: KeyPath) -> KeyPath:
    """Removes what is at a path, or the innermost table entry around it, and tells which it was. Arrays go whole."""
    table: Any = tables
    at = 0
    while at + 1 < len(path) and isinstance(table.get(path[at]), dict) and path[at + 1] in table[path[at]]:
        table, at = table[path[at]], at + 1
    if path and table.pop(path[at], None) is not None:
        return path[: at + 1]
    return ()


def _copied(value: Any) -> Any:
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _model_at(annotation: Any, path: KeyPath) -> type[BaseModel]:
    """The table at a path below one of this type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _model_at(annotation.model_fields[str(path[0])].annotation, path[1:]) if path else annotation
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, tuple):  # the part is the key, or the number, of an entry
        entry = arguments[1] if get_origin(annotation) is dict else arguments[0]
        return _model_at(entry, path[1:])
    return _model_at(next(each for each in arguments if _holds_model(each)), path)  # Annotated, or something or None


def _holds_model(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return True
    return any(_holds_model(each) for each in get_args(annotation))


def _shown(value: object) -> str:
    """A value for a sentence; it may be anything that TOML can say."""
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN_NUMBER:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value) if not isinstance(value, (list, tuple)) else f"an array of {len(value):,}"
    return cut(text)
