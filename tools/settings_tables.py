"""The keys of the policy file and of the configuration as tables of Markdown, made from the models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator, PlainValidator
from pydantic.fields import FieldInfo

from executor_server.core.config.key_types import Form, ReadForm, Section, WrittenSize

# Defaults that depend on the host or the user, in words.
MADE_DEFAULTS = {
    "sessions.max_sessions": "*by memory*",
    "server.state_dir": "`$EXECUTOR_STATE_DIR`, else `~/.local/state/remote-executor`",
    "local.images": "`base`: the environment that the daemon runs in",
    "docker.images": "`base`, `data`, `browser`: those of `make images`",
    "e2b.images": "`base`: `code-interpreter-v1`",
}
ENTRY_NAME = "NAME"  # stands for the name that a profile or a tenant is given
NO_BOUND = 2**62  # a larger bound is not shown


@dataclass(frozen=True)
class Table:
    """A table of the file."""

    path: str
    meaning: str
    model: type[Section]

    def keys(self) -> dict[str, FieldInfo]:
        return {
            name: field
            for name, field in self.model.model_fields.items()
            if _model_in(field.annotation) is None or f"{self.path}.{name}" in MADE_DEFAULTS
        }

    def tables(self) -> Iterator[Table]:
        for name, field in self.model.model_fields.items():
            model = _model_in(field.annotation)
            if model is not None:
                entry = f".{ENTRY_NAME}" if get_origin(field.annotation) is dict else ""
                meaning = _meaning(self.model, name, of_table=model)
                yield Table(f"{self.path}.{name}{entry}".removeprefix("."), meaning, model)


def lines(model: type[Section]) -> Iterator[str]:
    """Returns every key of a file, table by table."""
    return _lines([Table("", "", model)])


def _lines(tables: Sequence[Table]) -> Iterator[str]:
    """The keys of a table, or of several that have the same keys, and then the tables in the first of them."""
    if tables[0].keys():
        yield "### " + (" and ".join(f"`[{table.path}]`" for table in tables) if tables[0].path else "At the top")
        yield ""
        for table in tables:
            name = f"`{_last(table)}`: " if len(tables) > 1 else ""
            yield from [f"{name}{table.meaning}", ""] if table.meaning else []
        yield from _key_lines(tables)
        yield ""
    for _, group in groupby(tables[0].tables(), key=lambda table: list(table.keys())):
        yield from _lines(list(group))


def _key_lines(tables: Sequence[Table]) -> Iterator[str]:
    heads = ["Default"] if len(tables) == 1 else [f"`{_last(table)}`" for table in tables]
    yield f"| Key | Allowed | {' | '.join(heads)} | Meaning |"
    yield "|---|---|" + "---|" * len(heads) + "---|"
    for name, field in tables[0].keys().items():
        defaults = [_default(table, name) for table in tables]
        is_table = _model_in(field.annotation) is not None
        allowed = "table" if is_table else _allowed(field.annotation, field.metadata)
        cells = [f"`{name}`", allowed, *defaults, _meaning(tables[0].model, name)]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _last(table: Table) -> str:
    return table.path.rpartition(".")[2]


def _meaning(model: type[Section], name: str, *, of_table: type[Section] | None = None) -> str:
    """Returns the docstring of a key, from the class that declared it first; else that of the key's table."""
    declared = [each.model_fields.get(name) for each in model.__mro__ if issubclass(each, Section)]
    texts = [field.description for field in declared if field is not None]
    for text in (*texts, of_table.__doc__ if of_table is not None else None):
        if text:
            return " ".join(text.split())
    raise LookupError(f"{model.__name__}.{name} has no docstring")


def _model_in(annotation: Any) -> type[Section] | None:
    """Returns the table that a key leads to, if any."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((model for each in get_args(annotation) if (model := _model_in(each)) is not None), None)


def _default(table: Table, name: str) -> str:
    made = MADE_DEFAULTS.get(f"{table.path}.{name}")
    if made is not None:
        return made
    field = table.model.model_fields[name]
    if field.is_required():
        return "*must be set*"
    value = field.get_default(call_default_factory=True)
    return "*not set*" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return f"{value:_}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    return f'"{value}"'


def _allowed(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a key can have, in words."""
    form = next((each.func for each in metadata if isinstance(each, AfterValidator | PlainValidator)), None)
    if isinstance(form, Form | ReadForm):
        return form.text
    arguments = get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        inner = [item for each in annotation.__metadata__ for item in _items(each)]
        return _allowed(arguments[0], inner)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_allowed(each) for each in arguments if each is not type(None))
    if get_origin(annotation) is tuple:
        return f"array; each {_allowed(arguments[0])}"
    if get_origin(annotation) is dict:
        return f"table; each {_allowed(arguments[1])}"
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{_toml(each)}`" for each in arguments)
    if annotation is bool:
        return "`true` or `false`"
    if annotation in (str, Path):
        return "text" if annotation is str else "absolute path"
    return _number(annotation, metadata)


def _items(metadata: Any) -> list[Any]:
    """Constraints come as themselves, or in a Field."""
    return list(metadata.metadata) if isinstance(metadata, FieldInfo) else [metadata]


def _number(kind: type, metadata: Sequence[Any]) -> str:
    noun = {int: "integer", float: "number"}[kind]
    words = {Ge: "from", Gt: "above", Le: "to", Lt: "below"}
    bounds = [(words[type(each)], astuple(each)[0]) for each in metadata if type(each) in words]
    size = ['or text like `"8GB"`'] if WrittenSize in metadata else []
    return " ".join([noun, *(f"{word} {_toml(bound)}" for word, bound in bounds if bound < NO_BOUND), *size])
