"""The values that represent others whose class the receiver does not know.

Nothing here looks up or creates a class, or runs code of the value: an enum member becomes an `EnumValue`, a dataclass
a `Record`, a named tuple a `TupleRecord`, and a value without any form an `OpaqueValue`.
"""

from __future__ import annotations

from reprlib import recursive_repr

from executor_api.values.limits import Frozen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    Text = str
    """The built-in `str`, for annotations in a class that has an attribute of that name."""


# Characters of each text of an OpaqueValue in its own repr, which may be one of many in a list.
SHOWN_CHARS = 300


class OpaqueValue(Frozen):
    """A value that was not sent: only the name of its type and its texts were.

    `repr` and `str` are the results of these two functions at the sender, cut; `str(value)` returns `str`. `display`
    has the texts that notebooks show for the value, by MIME type: for a figure of plotly, for example.
    """

    __slots__ = ("type_name", "repr", "str", "display")  # noqa: RUF023 - in the order of __init__
    type_name: Text
    repr: Text
    str: Text

    display: Mapping[Text, Text]

    def __init__(
        self, type_name: Text, repr: Text, str: Text | None = None, display: Mapping[Text, Text] | None = None
    ) -> None:
        object.__setattr__(self, "type_name", type_name)
        object.__setattr__(self, "repr", repr)
        object.__setattr__(self, "str", repr if str is None else str)
        object.__setattr__(self, "display", dict(display or ()))

    def __hash__(self) -> int:
        return hash((self.type_name, self.repr, self.str))

    def __str__(self) -> Text:
        return self.str

    def __repr__(self) -> Text:
        text = "" if self.str == self.repr else f", str={_cut(self.str)}"
        types = f", display={list(self.display)}" if self.display else ""
        return f"OpaqueValue(type_name={self.type_name!r}, repr={_cut(self.repr)}{text}{types})"


class EnumValue(Frozen):
    """A member of an enum. `name` is None for a combination of flags that has none."""

    __slots__ = ("type_name", "name", "value")  # noqa: RUF023 - in the order of __init__
    type_name: str
    name: str | None
    value: Any

    def __init__(self, type_name: str, name: str | None, value: Any) -> None:
        object.__setattr__(self, "type_name", type_name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "value", value)

    def __hash__(self) -> int:
        return hash((self.type_name, self.name))  # a member can be a key even when its value could not

    def __str__(self) -> str:
        return f"{short_name(self.type_name)}.{repr(self.name)[1:-1]}" if self.name else repr(self)


class Record:
    """A dataclass instance: its fields are attributes, and `fields` maps their names to their values.

    A field takes precedence over an attribute of this class: when a dataclass has a field `fields`, `record.fields` is
    that field.
    """

    __slots__ = ("_fields", "_type_name")
    _fields: dict[str, Any]
    _type_name: str

    def __init__(self, type_name: str, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_type_name", type_name)
        object.__setattr__(self, "_fields", dict(fields))

    def __getattr__(self, name: str) -> Any:
        # Python asks here for whatever is not a slot or a method, also before the slots are set, while it copies.
        if name not in Record.__slots__ and not is_dunder(name):
            if name in self._fields:
                return self._fields[name]
            if name == "type_name":
                return self._type_name
            if name == "fields":
                return dict(self._fields)
        raise AttributeError(f"no field {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Record does not change")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a Record does not change")

    def __dir__(self) -> Iterable[str]:
        return [*object.__dir__(self), *self._fields]

    def __eq__(self, other: object) -> bool:
        if type(other) is not Record:
            return NotImplemented
        if self._type_name != other._type_name:
            return False
        return list(self._fields.items()) == list(other._fields.items())

    def __hash__(self) -> int:
        try:
            return hash((self._type_name, *self._fields.items()))
        except TypeError:
            # A dataclass compared by identity is hashable whatever its fields are, and can be a key.
            return hash((self._type_name, *self._fields))

    @recursive_repr("Record(...)")
    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._fields.items())
        return f"{short_name(self._type_name)}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self._type_name, self._fields)


class TupleRecord(tuple):  # type: ignore[type-arg]  # subscripting a builtin needs no 3.9 syntax, but costs an import
    """A named tuple: a tuple whose items are attributes too. Equal to any tuple with the same items."""

    _type_name: str
    _fields: tuple[str, ...]

    def __new__(cls, type_name: str, names: Iterable[str], values: Iterable[Any]) -> TupleRecord:
        self = tuple.__new__(cls, values)
        fields = tuple(names)
        if len(fields) != len(self):
            raise ValueError(f"{len(fields)} names for {len(self)} items")
        # In the instance, where a field named `count` takes precedence over the method of that name.
        self.__dict__.update(zip(fields, self))
        self.__dict__.update(_type_name=type_name, _fields=fields)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "type_name" and "_type_name" in self.__dict__:
            return self._type_name
        raise AttributeError(f"no field {name!r}")

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self))
        return f"{short_name(self._type_name)}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TupleRecord, (self._type_name, self._fields, tuple(self))


def _cut(text: str) -> str:
    return repr(text) if len(text) <= SHOWN_CHARS else repr(text[:SHOWN_CHARS] + "…")


def short_name(type_name: str) -> str:
    """Returns the last part of a type's name, escaped: a sandbox can put characters into it that a terminal obeys."""
    return repr(type_name.rpartition(".")[2])[1:-1]


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def is_field_name(name: object, *, underscore: bool) -> bool:
    """True when `name` can be an attribute of a decoded value without meaning anything to Python itself."""
    if type(name) is not str or not name.isidentifier() or is_dunder(name):
        return False
    return name not in Record.__slots__ and (underscore or not name.startswith("_"))
