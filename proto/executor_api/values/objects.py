"""Encodes and decodes values of classes that the other side does not have.

In order: a member of an enum, a dataclass, a named tuple, a subclass of one of Python's own types, anything else. A
subclass of a builtin is sent as that builtin: its type is lost, its content is not. It is read with the builtin's own
methods, so overriding methods do not run.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import islice
from reprlib import Repr

from executor_api.displays import pack, unpack
from executor_api.values import containers, scalars
from executor_api.values.generic import EnumValue, OpaqueValue, Record, TupleRecord, is_field_name
from executor_api.values.kinds import ANY_NUMBER, Kind
from executor_api.values.limits import MAX_INT_BITS, MAX_TYPE_NAME_CHARS, DecodeError
from executor_api.values.times import lower_zone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

# ---------------------------------------------------------------------------------------------------------------------
# Names and texts of values that can't be trusted to give them


def type_name_of(kind: type) -> str:
    """Returns the qualified name of a class, in at most MAX_TYPE_NAME_CHARS; builtins without their module."""
    # Bypassing the metaclass, which could return anything.
    name = type.__dict__["__qualname__"].__get__(kind)
    module = type.__dict__["__module__"].__get__(kind)
    if type(module) is str and module != "builtins":
        name = f"{module}.{name}"
    return _cut(name, MAX_TYPE_NAME_CHARS)


def bounded_repr(value: object, limit_chars: int, passing: tuple[type[BaseException], ...] = ()) -> str:
    """Returns the result of `repr`, cut. For a repr that raises, names the exception unless it is `passing`."""
    if type(value) is int and value.bit_length() > MAX_INT_BITS:
        return f"<an int of {value.bit_length()} bits>"
    try:
        if type(value) is str:
            value = value[:limit_chars]
        text = _SHORT.repr(value) if id(type(value)) in _SHORTENED_IDS else repr(value)
    except passing:
        raise
    # This is the value's own code; its exception, SystemExit included, is part of its text.
    except BaseException as error:  # noqa: BLE001
        text = f"<{type_name_of(type(value))}, whose repr raised {type_name_of(type(error))}>"
    return _cut(text, limit_chars)


def bounded_str(value: object, limit_chars: int, passing: tuple[type[BaseException], ...] = ()) -> str | None:
    """Returns the result of `str`, cut, for a value whose class has a `__str__` of its own; else None."""
    if id(type(value)) in _SHORTENED_IDS:
        return None
    try:
        return None if type(value).__str__ is object.__str__ else _cut(str(value), limit_chars)
    except passing:
        raise
    except BaseException:  # noqa: BLE001 - as above; its repr is what is left to show
        return None


def _cut(text: str, limit_chars: int) -> str:
    if str.__len__(text) > limit_chars:
        text = str.__getitem__(text, slice(0, limit_chars - 1)) + "…"
    return str.encode(text, "utf-8", "backslashreplace").decode("utf-8")[:limit_chars]


class _Short(Repr):
    """Looks at the first items only: the base class would sort all of a dict, and write all of the bytes."""

    repr_bytes = repr_bytearray = Repr.repr_str

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        shown = super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)
        return shown if type(x) is dict else f"{type(x).__name__}({shown})"

    repr_Counter = repr_OrderedDict = repr_defaultdict = repr_dict

    def repr_set(self, x: set[Any], level: int) -> str:
        return super().repr_set(set(islice(x, self.maxset + 1)), level)

    def repr_frozenset(self, x: frozenset[Any], level: int) -> str:
        return super().repr_frozenset(frozenset(islice(x, self.maxfrozenset + 1)), level)


# By id: a class can have a metaclass without a hash.
_SHORTENED = (list, tuple, dict, set, frozenset, bytes, bytearray, Counter, OrderedDict, defaultdict, deque)
_SHORTENED_IDS = frozenset(map(id, _SHORTENED))
_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 200
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = 20


# ---------------------------------------------------------------------------------------------------------------------
# Lowering


def lower_generic(value: Any, writer: Writer) -> Lowered | None:
    """Returns the most detailed form of a value without its class; None when only its repr is left."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return ["enum", type_name_of(kind)], (value._name_, value._value_), False
    if hasattr(kind, "__dataclass_fields__"):
        lowered = _lower_dataclass(value, kind)
        if lowered is not None:
            return lowered
    if issubclass(kind, tuple):
        names = getattr(kind, "_fields", None)
        if type(names) is tuple and _are_field_names(names, underscore=False) and len(names) == tuple.__len__(value):
            return ["namedtuple", type_name_of(kind), list(names)], tuple(tuple.__iter__(value)), False
    for base, exact, lower in _BASES:
        if issubclass(kind, base):
            based: Lowered | None = lower(exact(value), writer)
            return based
    if "datetime" in sys.modules and issubclass(kind, sys.modules["datetime"].tzinfo):
        return lower_zone(value, writer)
    return None


def _lower_dataclass(value: Any, kind: type) -> Lowered | None:
    fields = sys.modules["dataclasses"].fields(kind)
    names = [field.name for field in fields]
    if not _are_field_names(names, underscore=True):
        return None
    return ["record", type_name_of(kind), names], [getattr(value, name) for name in names], True


def _are_field_names(names: Any, *, underscore: bool) -> bool:
    return len(set(names)) == len(names) and all(is_field_name(name, underscore=underscore) for name in names)


# The base, the function that reads it from an instance of a subclass without running that subclass's code, and its
# lowering.
_BASES: tuple[tuple[type, Any, Any], ...] = (
    (str, str.__str__, scalars.LOWER[str]),
    (int, int.__int__, scalars.LOWER[int]),
    (float, float.__float__, scalars.LOWER[float]),
    (complex, lambda value: complex.__add__(value, 0j), scalars.LOWER[complex]),
    (bytes, lambda value: bytes.__getitem__(value, slice(None)), scalars.LOWER[bytes]),
    (bytearray, lambda value: bytearray.__getitem__(value, slice(None)), scalars.LOWER[bytearray]),
    (list, lambda value: list.__getitem__(value, slice(None)), containers.LOWER[list]),
    (tuple, lambda value: tuple.__getitem__(value, slice(None)), containers.LOWER[tuple]),
    (dict, lambda value: dict(dict.items(value)), containers.LOWER[dict]),
    (set, set.copy, containers.LOWER[set]),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value)), containers.LOWER[frozenset]),
)


def lower_opaque(value: OpaqueValue, writer: Writer) -> Lowered:
    limit_chars = writer.limits.repr_chars
    name, shown, text = _own_name(value.type_name), _cut(value.repr, limit_chars), _cut(value.str, limit_chars)
    if value.display:
        return ["opaque-display", name, shown, text, writer.add_buffer(pack(value.display))], (), False
    # Earlier receivers know only the shorter form.
    return (["opaque", name, shown] if text == shown else ["opaque-str", name, shown, text]), (), False


def make_opaque(
    value: object,
    limit_chars: int,
    passing: tuple[type[BaseException], ...],
    reason: str,
    display: dict[str, str] | None,
) -> OpaqueValue:
    """Returns the OpaqueValue that represents a value by its texts; each of them begins with the reason."""
    shown = reason + bounded_repr(value, limit_chars, passing)
    text = bounded_str(value, limit_chars, passing)
    return OpaqueValue(type_name_of(type(value)), shown, None if text is None else reason + text, display)


def _own_name(type_name: str) -> str:
    """Cuts a name and escapes halves of surrogate pairs in it, which can't be sent."""
    return _cut(type_name, MAX_TYPE_NAME_CHARS)


def _lower_enum_value(value: EnumValue, writer: Writer) -> Lowered:
    return ["enum", _own_name(value.type_name)], (value.name, value.value), False


def _lower_record(value: Record, writer: Writer) -> Lowered:
    return ["record", _own_name(value._type_name), list(value._fields)], list(value._fields.values()), True


def _lower_tuple_record(value: TupleRecord, writer: Writer) -> Lowered:
    return ["namedtuple", _own_name(value._type_name), list(value._fields)], tuple(value), False


# ---------------------------------------------------------------------------------------------------------------------
# Making


def _make_opaque(reader: Reader, children: list[Any], type_name: str, text: str) -> OpaqueValue:
    return OpaqueValue(type_name[:MAX_TYPE_NAME_CHARS], text[: reader.limits.repr_chars])


def _make_opaque_str(reader: Reader, children: list[Any], type_name: str, shown: str, text: str) -> OpaqueValue:
    limit_chars = reader.limits.repr_chars
    return OpaqueValue(type_name[:MAX_TYPE_NAME_CHARS], shown[:limit_chars], text[:limit_chars])


def _make_opaque_display(
    reader: Reader, children: list[Any], type_name: str, shown: str, text: str, number: int
) -> OpaqueValue:
    try:
        display = unpack(reader.take_buffer(number))
    except ValueError as error:
        raise DecodeError(str(error)) from error
    limit_chars = reader.limits.repr_chars
    return OpaqueValue(type_name[:MAX_TYPE_NAME_CHARS], shown[:limit_chars], text[:limit_chars], display)


def _make_enum_value(reader: Reader, children: list[Any], type_name: str) -> EnumValue:
    name, value = children
    if name is not None and type(name) is not str:
        raise DecodeError("the name of an enum's member is not text")
    return EnumValue(type_name[:MAX_TYPE_NAME_CHARS], name, value)


def _open_record(type_name: str, names: list[Any]) -> Record:
    if not _are_field_names(names, underscore=True):
        raise DecodeError("a record has a field that cannot be an attribute")
    return Record(type_name[:MAX_TYPE_NAME_CHARS], dict.fromkeys(names))


def _fill_record(reader: Reader, value: Record, children: list[Any], type_name: str, names: list[str]) -> Record:
    if len(names) != len(children):
        raise DecodeError(f"a record has {len(names)} fields and {len(children)} values")
    value._fields.update(zip(names, children))
    return value


def _make_tuple_record(reader: Reader, children: list[Any], type_name: str, names: list[Any]) -> TupleRecord:
    if not _are_field_names(names, underscore=False) or len(names) != len(children):
        raise DecodeError("the names of a named tuple do not fit it")
    return TupleRecord(type_name[:MAX_TYPE_NAME_CHARS], names, children)


def _make_foreign(reader: Reader, children: list[Any], number: int) -> object:
    if reader.foreign is None:
        raise DecodeError("a foreign value is not accepted here")
    try:
        return reader.foreign(reader.take_buffer(number))
    except Exception as error:  # runs code of the value's author: its exception is the reason that is reported
        advice = ". Use an image that has it, or send what is in the value" if isinstance(error, ImportError) else ""
        raise DecodeError(f"a foreign value cannot be made: {type_name_of(type(error))}: {error}{advice}") from error


LOWER = {
    OpaqueValue: lower_opaque,
    EnumValue: _lower_enum_value,
    Record: _lower_record,
    TupleRecord: _lower_tuple_record,
}
KINDS = {
    "opaque": Kind(_make_opaque, header=(str, str)),
    "opaque-str": Kind(_make_opaque_str, header=(str, str, str)),
    "opaque-display": Kind(_make_opaque_display, header=(str, str, str, int)),
    "enum": Kind(_make_enum_value, header=(str,), children=2),
    "record": Kind(_fill_record, header=(str, list), children=ANY_NUMBER, open=_open_record),
    "namedtuple": Kind(_make_tuple_record, header=(str, list), children=ANY_NUMBER),
    "foreign": Kind(_make_foreign, header=(int,)),
}
