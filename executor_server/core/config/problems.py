"""Validates settings as a whole: every problem becomes one sentence with the path of its key and what is allowed."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from executor_server.core.config.key_types import ConfigError

MAX_PROBLEMS = 200

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_KEY_PART = re.compile(r'[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"')
_USERINFO = re.compile(r"//\S*@")
_CONTRADICTION = "contradiction"
_IN_TOML = {
    "missing": "is missing",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "dataclass_type": "must be a table",
    "tuple_type": "must be an array",
    "too_short": "must have an entry",
}
_NO_SUCH_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, of a dataclass
_MAX_ROUNDS = 5
_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_NAMES = 20
_MAX_SHOWN_NUMBER = 10**30

KeyPath = tuple[int | str, ...]
"""The path of a key: the tables that lead to it, and its own name."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Problem:
    """One thing to mend: the path of its key, and what is allowed there."""

    path: KeyPath
    text: str
    also: tuple[KeyPath, ...] = ()  # other keys of a contradiction: mending one of them would do too

    def __str__(self) -> str:
        return f"{dotted(self.path)}: {self.text}" if self.path else self.text


def validated(model: type[Model], tables: Mapping[str, Any], directory: Path | None = None) -> Model:
    """Returns the settings in these tables. Raises ConfigError with every problem.

    Relative paths begin at `directory`, that of the file; without one they are refused.
    """
    settings, problems = examined(model, tables, directory)
    if settings is None:
        raise config_error(problems)
    return settings


def config_error(problems: Sequence[Problem]) -> ConfigError:
    listed = [str(problem) for problem in problems[:MAX_PROBLEMS]]
    left = len(problems) - len(listed)
    return ConfigError([*listed, f"and {left:,} more"] if left else listed)


def examined(
    model: type[Model], tables: Mapping[str, Any], directory: Path | None = None
) -> tuple[Model | None, list[Problem]]:
    """Returns the settings in these tables, or every problem.

    pydantic compares values that could contradict each other only when each is right by itself. So wrong values are
    removed and the rest is validated again, which finds all problems at once.
    """
    problems: list[Problem] = []
    removed: set[KeyPath] = set()
    for _ in range(_MAX_ROUNDS):
        try:
            settings = model.model_validate(tables, context=directory)
        except ValidationError as error:
            found = [_problem(model, details) for details in error.errors()]
        else:
            return (None if problems else settings), problems
        around = {path[:depth] for path in removed for depth in range(len(path))}
        problems += [each for each in found if each not in problems and not _is_aftermath(each, removed, around)]
        tables, removed_now = _without(tables, found)
        if not removed_now:
            break
        removed |= removed_now
    return None, problems


def contradiction(path: KeyPath, text: str, value: object, *, also: Sequence[KeyPath] = ()) -> InitErrorDetails:
    """A problem for `refuse`. The paths are relative to the table whose validator found it."""
    context = {"text": text, "depth": len(path), "also": tuple(also)}
    return InitErrorDetails(type=PydanticCustomError(_CONTRADICTION, "{text}", context), loc=path, input=value)


def refuse(model: BaseModel, contradictions: Sequence[InitErrorDetails]) -> None:
    """Raises all contradictions that the validator of a table has found, each with a path of its own."""
    if contradictions:
        raise ValidationError.from_exception_data(type(model).__name__, list(contradictions))


def dotted(path: KeyPath) -> str:
    """Returns a path as TOML would write it: `images."a.b"`."""
    parts = [cut(str(part)) for part in path]
    return ".".join(part if _BARE_KEY.fullmatch(part) else json.dumps(part) for part in parts)


def undotted(path: str) -> KeyPath:
    """Returns the parts of a path that `dotted` wrote."""
    return tuple(json.loads(part) if part.startswith('"') else part for part in _KEY_PART.findall(path))


def cut(text: str) -> str:
    """Shortens a text of the file for a sentence."""
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"


def some_of(names: Collection[str]) -> str:
    """Joins names for a sentence, the first of them when there are many."""
    shown = ", ".join(itertools.islice(names, _MAX_SHOWN_NAMES))
    return shown if len(names) <= _MAX_SHOWN_NAMES else f"{shown} and {len(names) - _MAX_SHOWN_NAMES:,} more"


def _problem(model: type[BaseModel], details: ErrorDetails) -> Problem:
    path = details["loc"]
    if details["type"] in _NO_SUCH_KEY:
        return Problem(path, f"no such key; available: {', '.join(_keys_at(model, path[:-1]))}")
    if path and path[-1] == "[key]":  # pydantic's mark of a problem with an entry's name
        path = path[:-1]
    message = _IN_TOML.get(details["type"]) or details["msg"].removeprefix("Value error, ").replace(
        "Input should be ", "must be ", 1
    )
    value = details["input"]
    # Problems go to logs, and for good to the audit log: a secret may stand where its name belongs.
    is_hidden = isinstance(value, (dict, BaseModel)) or _is_unshown(model, path)
    shown = "" if is_hidden else f" (it is {_shown(value)})"
    if details["type"] != _CONTRADICTION:
        return Problem(path, f"{message}{shown}")
    context = details["ctx"]
    table = path[: len(path) - context["depth"]]
    return Problem(path, f"{context['text']}{shown}", tuple((*table, *each) for each in context["also"]))


def _is_aftermath(problem: Problem, removed: Set[KeyPath], around: Set[KeyPath]) -> bool:
    """True if a problem at or around a removed value may come from the removal: the value's own is reported already."""
    return any(
        path in around or any(path[:depth] in removed for depth in range(1, len(path) + 1))
        for path in (problem.path, *problem.also)
    )


def _without(tables: Mapping[str, Any], problems: Sequence[Problem]) -> tuple[dict[str, Any], set[KeyPath]]:
    """Returns the tables without the keys of these problems, and the paths that were removed."""
    rest = _copied(tables)
    removed = set()
    for problem in problems:
        removed |= {_remove(rest, path) for path in (problem.path, *problem.also)}
    return rest, removed - {()}


def _remove(tables: dict[str, Any], path: KeyPath) -> KeyPath:
    """Removes the value at a path, or the innermost table entry around it, and returns its path. Arrays go whole."""
    table: Any = tables
    at = 0
    while at + 1 < len(path) and isinstance(table.get(path[at]), dict) and path[at + 1] in table[path[at]]:
        table, at = table[path[at]], at + 1
    if path and table.pop(path[at], None) is not None:
        return path[: at + 1]
    return ()


def _copied(value: Any) -> Any:
    return {key: _copied(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _keys_at(annotation: Any, path: KeyPath) -> list[str]:
    """Returns the keys of the table at a path below this type. A dataclass has no tables below it."""
    if is_dataclass(annotation):
        return [each.name for each in fields(annotation)]
    if _is_model(annotation):
        models = annotation.model_fields
        return _keys_at(models[str(path[0])].annotation, path[1:]) if path else list(models)
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, tuple):  # the part is the key, or the number, of an entry
        entry = arguments[1] if get_origin(annotation) is dict else arguments[0]
        return _keys_at(entry, path[1:])
    return _keys_at(next(each for each in arguments if _holds_table(each)), path)  # Annotated, or something or None


def _is_unshown(annotation: Any, path: KeyPath) -> bool:
    """True if the path leads to a field that is marked by `UNSHOWN`, through one, or to a table around one."""
    if _is_model(annotation):
        models = annotation.model_fields
        on_path = [models[name] for name in ([str(path[0])] if path else models) if name in models]
        return any(not field.repr or _is_unshown(field.annotation, path[1:]) for field in on_path)
    arguments = get_args(annotation)
    if get_origin(annotation) in (dict, tuple):
        return _is_unshown(arguments[1] if get_origin(annotation) is dict else arguments[0], path[1:])
    return any(_is_unshown(each, path) for each in arguments)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _holds_table(annotation: Any) -> bool:
    return _is_model(annotation) or is_dataclass(annotation) or any(map(_holds_table, get_args(annotation)))


def _shown(value: object) -> str:
    """Shows a value of any TOML type in a sentence."""
    if isinstance(value, int) and abs(value) >= _MAX_SHOWN_NUMBER:
        return f"a number of {value.bit_length():,} bits"
    text = repr(value) if not isinstance(value, (list, tuple)) else f"an array of {len(value):,}"
    return cut(_USERINFO.sub("//…@", text))
