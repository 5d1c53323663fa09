"""Copies values between dataclasses and messages, by field name.

The names come from the message's schema and from the dataclass, never from the content of a message. A dataclass field
with another name than the wire's says so: `field(metadata=on_wire("default_hosts"))`. Nested values, lists, maps and
enums follow from the types. An enum of the wire is an enum in Python, or texts ("exited" for PROCESS_OUTCOME_EXITED). A
time is read as a datetime, and written from the seconds in an attribute NAME_s.

The steps for each pair of types are worked out once.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

T = TypeVar("T")
M = TypeVar("M", bound=Message)

LIST_MAX = 65_536
"""Entries that a list or a map may have. A policy file has no room for more."""

_Convert = Callable[[Any], Any] | None
_reading: dict[Any, list[tuple[str, str, Mapping[str, Any] | None, _Convert]]] = {}
_writing: dict[Any, list[tuple[str, str, int | None, _Convert]]] = {}


class Unreadable(ValueError):
    """A message holds something that no correct program sends."""


def on_wire(name: str) -> Mapping[str, str]:
    """Returns the metadata of a dataclass field that has this name in the message."""
    return {"wire": name}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read(kind: type[T], message: Message, **known: Any) -> T:
    """Returns the dataclass that the message describes; `known` are the fields that are not read from it.

    An absent field has the dataclass's default, else None where the type allows it, else what an empty message gives.
    Raises Unreadable for an unknown value of an enum, a time out of range, and lists that are too long.
    """
    steps = _reading.get((kind, type(message), *known))
    if steps is None:
        steps = prepare(kind, type(message), *known)
    for name, wire_name, if_absent, convert in steps:
        if if_absent is not None and not message.HasField(wire_name):
            known.update(if_absent)
        else:
            value = getattr(message, wire_name)
            known[name] = value if convert is None else convert(value)
    return kind(**known)


def prepare(kind: Any, made: type[Message], *known: str) -> list[tuple[str, str, Mapping[str, Any] | None, _Convert]]:
    """Works out how `kind` is read from messages of the type `made`.

    This compiles the text of type hints. The daemon compiles nothing while it serves, so it calls this when it starts.
    """
    steps = _reading[(kind, made, *known)] = _steps_to_read(kind, made, frozenset(known))
    return steps


def _steps_to_read(
    kind: Any, made: type[Message], known: frozenset[str]
) -> list[tuple[str, str, Mapping[str, Any] | None, _Convert]]:
    hints = typing.get_type_hints(kind)
    steps = []
    for each in dataclasses.fields(kind):
        if each.name in known:
            continue
        wire_name = each.metadata.get("wire", each.name)
        field: Any = made.DESCRIPTOR.fields_by_name[wire_name]
        hint = hints[each.name]
        if_absent: Mapping[str, Any] | None = None
        if field.has_presence and each.default is not dataclasses.MISSING:
            if_absent = {}
        if isinstance(hint, types.UnionType):
            (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
            if_absent = {each.name: None} if if_absent is None else if_absent
        steps.append((each.name, wire_name, if_absent, _reader(hint, field)))
    return steps


def _reader(hint: Any, field: Any) -> _Convert:
    if not field.is_repeated:
        return _reader_of_one(hint, field)

    def bounded(entries: Any) -> Any:
        if len(entries) > LIST_MAX:
            raise Unreadable(f"{field.name} has more than {LIST_MAX:,} entries")
        return entries

    if typing.get_origin(hint) is not tuple:
        return lambda entries: dict(bounded(entries))
    convert = _reader_of_one(typing.get_args(hint)[0], field)
    if convert is None:
        return lambda entries: tuple(bounded(entries))
    return lambda entries: tuple(map(convert, bounded(entries)))


def _reader_of_one(hint: Any, field: Any) -> _Convert:
    if field.enum_type is not None:
        is_enum = isinstance(hint, enum.EnumType)
        members = hint.__members__ if is_enum else {text.upper(): text for text in typing.get_args(hint)}
        by_number = {number: members[name] for name, number in _numbers(field.enum_type).items() if name in members}
        return functools.partial(_member, by_number, field.name)
    if field.message_type is None:
        return None
    return _time if _is_time(field) else functools.partial(read, hint)


def _member(by_number: Mapping[int, Any], what: str, number: int) -> Any:
    if number not in by_number:
        raise Unreadable(f"{what} has the unknown value {number}")
    return by_number[number]


def _time(stamp: Any) -> datetime:
    try:
        return datetime.fromtimestamp(stamp.seconds + stamp.nanos / 1e9, UTC)
    except (OverflowError, OSError, ValueError) as error:
        raise Unreadable(f"a time is out of range: {stamp.seconds} s") from error


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write(made: type[M], *values: Any, **fields: Any) -> M:
    """Returns a message with these fields, and with the attributes of `values` that have the names of other fields.

    Attributes that the message has no field for are ignored. Each field that is not `optional` must be in one of the
    values. Text that UTF-8 can't encode is escaped: it may come out of a sandbox.
    """
    key = (made, *map(type, values), *fields)
    steps = _writing.get(key)
    if steps is None:
        steps = _writing[key] = _steps_to_write(made, values, frozenset(fields))
    for name, attribute, index, convert in steps:
        value = fields[name] if index is None else getattr(values[index], attribute)
        fields[name] = value if convert is None or value is None else convert(value)
    return made(**fields)


def _steps_to_write(
    made: type[Message], values: tuple[Any, ...], given: frozenset[str]
) -> list[tuple[str, str, int | None, _Convert]]:
    """Raises LookupError for a field that none of the values has, or several."""
    steps: list[tuple[str, str, int | None, _Convert]] = []
    for field in made.DESCRIPTOR.fields:
        attribute = f"{field.name}_s" if _is_time(field) else field.name
        found = [index for index, value in enumerate(values) if hasattr(value, attribute)]
        if field.name in given:
            steps.append((field.name, "", None, _writer(field)))
        elif len(found) == 1:
            steps.append((field.name, attribute, found[0], _writer(field)))
        elif found or field.containing_oneof is None:  # an `optional` field is alone in a oneof
            raise LookupError(f"{len(found)} of the values have {field.full_name}")
    return steps


def _writer(field: Any) -> _Convert:
    convert: Callable[[Any], Any]
    if field.enum_type is not None:
        numbers = _numbers(field.enum_type)
        convert = lambda value: numbers[value.name if isinstance(value, enum.Enum) else value.upper()]  # noqa: E731
    elif field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return None
        made = GetMessageClass(field.message_type)
        write_one = _stamp if _is_time(field) else write
        convert = lambda value: value if isinstance(value, Message) else write_one(made, value)  # noqa: E731
    elif field.type == field.TYPE_STRING:
        convert = _text
    else:
        return None
    return (lambda entries: list(map(convert, entries))) if field.is_repeated else convert


def _stamp(made: type[M], time_s: float) -> M:
    seconds, rest = divmod(time_s, 1)
    return made(seconds=int(seconds), nanos=int(rest * 1_000_000_000))


def _text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


# ---------------------------------------------------------------------------------------------------------------------
# Descriptors


def _is_time(field: Any) -> bool:
    return field.message_type is not None and field.message_type.full_name == "google.protobuf.Timestamp"


def _numbers(described: Any) -> dict[str, int]:
    """Returns the values of an enum by name, without the prefix of the enum and the unspecified value."""
    prefix = described.values[0].name.removesuffix("UNSPECIFIED")
    return {each.name.removeprefix(prefix): each.number for each in described.values[1:]}
