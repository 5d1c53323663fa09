"""Describes messages: fields with a type and bounds, checked when they are read, written in the order of the class.

    class Log(Message, kind=Kind.LOG):
        id: str = text(64)
        stream: str = one_of("stdout", "stderr")

    channel.send(Log(id="e", stream="stdout"), b"text")     # one end
    log = Log.read(frame.head)                              # the other end: raises FrameError, or every field is right

A value is frozen. `read` checks every field before any can be used. A field with a default may be missing, but it is
checked if it is present: null does not mean that it is missing. Unknown fields are ignored. A value that is created by
this end is not checked: it is ours, and the other end checks it. None is never written; it means that a field is
omitted.

These are not dataclasses: `dataclasses` imports inspect, re and more, which takes about 10 ms of the start of a
sandbox, and makes each `__init__` by exec. Collecting the fields in `__init_subclass__` takes 0.4 ms for all messages.
Type checkers see dataclasses, by `dataclass_transform`.
"""

from __future__ import annotations

from .frames import Fields, Frame, FrameError
from .lean import NotJson, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, TypeVar, dataclass_transform

    R = TypeVar("R", bound="Record")
else:

    def dataclass_transform(**_more: Any) -> Callable[[type], type]:
        return lambda cls: cls


_ID_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_ID_CHARS = 64
_MAX_INTEGER = 2**63 - 1
_REQUIRED = object()
_SCALARS = frozenset((str, int, float, bool))  # written as they are


class Field:
    """One field: the function that reads and checks its value, its bounds, and its default."""

    __slots__ = ("bounds", "default", "kind", "reader")

    def __init__(self, default: Any, reader: Callable[..., Any], *bounds: Any) -> None:
        self.default = default
        self.reader = reader
        self.bounds = bounds
        self.kind = _KINDS.get(reader)


def text(max_chars: int, *, default: Any = _REQUIRED) -> Any:
    """A text of at most `max_chars` characters."""
    return Field(default, Fields.text, max_chars)


def identifier(*, may_be_empty: bool = False, default: Any = _REQUIRED) -> Any:
    """An id for clients, in the form that the API accepts in requests."""
    return Field(default, _read_id, may_be_empty)


def one_of(*values: str, default: Any = _REQUIRED) -> Any:
    """One of these words."""
    return Field(default, _read_one_of, frozenset(values))


def integer(low: int = 0, high: int = _MAX_INTEGER, *, default: Any = _REQUIRED) -> Any:
    """An integer in this range."""
    return Field(default, Fields.integer, low, high)


def number(low: float = 0.0, high: float = 1e12, *, default: Any = _REQUIRED) -> Any:
    """A finite number in this range."""
    return Field(default, Fields.number, low, high)


def boolean(*, default: Any = _REQUIRED) -> Any:
    """True or false."""
    return Field(default, Fields.boolean)


def texts(max_items: int, max_chars: int, *, default: Any = _REQUIRED) -> Any:
    """A list of at most `max_items` texts of at most `max_chars` characters each."""
    return Field(default, Fields.texts, max_items, max_chars)


def record(cls: type[Record], *, default: Any = _REQUIRED) -> Any:
    """A nested record."""
    return Field(default, _read_record, cls)


def records(cls: type[Record], max_items: int, *, default: Any = _REQUIRED) -> Any:
    """A list of at most `max_items` nested records."""
    return Field(default, _read_records, cls, max_items)


def scalars(max_items: int, *, default: Any = _REQUIRED) -> Any:
    """An object of at most `max_items` texts and numbers; the sender chooses the names."""
    return Field(default, _read_scalars, max_items)


def _read_id(fields: Fields, name: str, may_be_empty: bool) -> str:
    value = fields.text(name, _ID_CHARS)
    if not (value or may_be_empty) or not _ID_CHARACTERS.issuperset(value):
        raise FrameError(f"field {name} is not an id")
    return value


def _read_one_of(fields: Fields, name: str, allowed: frozenset[str]) -> str:
    value = fields.text(name, 64)
    if value not in allowed:
        raise FrameError(f"field {name} is none of {sorted(allowed)}")
    return value


# Readers whose check `Record.read` repeats inline, and the type of their values.
_KINDS = {Fields.text: str, Fields.integer: int, Fields.number: float, Fields.boolean: bool, _read_one_of: frozenset}


def _read_record(fields: Fields, name: str, cls: type[R]) -> R:
    value = fields.object(name)
    if value is None:
        raise FrameError(f"field {name} is not an object")
    return cls.read(value)


def _read_records(fields: Fields, name: str, cls: type[R], max_items: int) -> list[R]:
    return [cls.read(item) for item in fields.objects(name, max_items)]


def _read_scalars(fields: Fields, name: str, max_items: int) -> dict[str, Any]:
    value = fields.object(name)
    if value is None or len(value.values) > max_items:
        raise FrameError(f"field {name} is not an object of at most {max_items}")
    if not all(isinstance(item, (str, int, float)) for item in value.values.values()):
        raise FrameError(f"field {name} has an item that is no scalar")
    return value.values


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(text, identifier, one_of, integer, number, boolean, texts, record, records, scalars),
)
class Record:
    """Fields with a type and bounds. Frozen."""

    fields: dict[str, Field] = {}  # noqa: RUF012 - each class has its own
    _blank: dict[str, Any] = {}  # noqa: RUF012 - the fields in their order, with their defaults
    _required: set[str] = set()  # noqa: RUF012
    _is_flat = True  # it has no nested record and no optional field

    def __init_subclass__(cls) -> None:
        """Collects the fields. They stay attributes of the class; an instance's values hide them."""
        own = [(name, field) for name, field in vars(cls).items() if type(field) is Field]
        if not own:
            return
        fields, blank, required = dict(cls.fields), dict(cls._blank), set(cls._required)
        for name, field in own:
            fields[name], blank[name] = field, field.default
            if field.default is _REQUIRED:
                required.add(name)
            if field.default is None or field.reader is _read_record or field.reader is _read_records:
                cls._is_flat = False
        cls.fields, cls._blank, cls._required = fields, blank, required

    def __init__(self, **values: Any) -> None:
        """Raises TypeError for a missing or unknown field, which is our bug."""
        own = self.__dict__
        own.update(self._blank)
        own.update(values)
        if len(own) != len(self._blank) or not self._required <= values.keys():
            raise TypeError(f"{type(self).__name__} has {list(self._blank)}, and was given {list(values)}")

    def __setattr__(self, name: str, _value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is frozen")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    __hash__ = None  # type: ignore[assignment]  # a list may be in it

    def head(self) -> dict[str, Any]:
        """Returns the fields as they are written, in the order of the class, without those that are None."""
        if self._is_flat:
            return dict(self.__dict__)
        return {
            name: value if type(value) in _SCALARS else _written(value)
            for name, value in self.__dict__.items()
            if value is not None
        }

    def but(self: R, **changes: Any) -> R:
        """Returns a copy with these fields changed."""
        return type(self)(**{**self.__dict__, **changes})

    @classmethod
    def read(cls: type[R], fields: Fields) -> R:
        """Reads a record. Raises FrameError if a field is missing or does not fit its type and bounds."""
        new, values = cls.__new__(cls), fields.values
        own = new.__dict__
        for name, field in cls.fields.items():
            if name in values:
                value, bounds, fits = values[name], field.bounds, False
                # Nearly all fields are scalars. This inline check takes a third of the time of their reader.
                kind = field.kind
                if kind is str:
                    fits = type(value) is str and len(value) <= bounds[0]
                elif kind is int or kind is float:
                    fits = type(value) is kind and bounds[0] <= value <= bounds[1]
                elif kind is bool:
                    fits = type(value) is bool
                elif kind is frozenset:
                    fits = type(value) is str and value in bounds[0]
                own[name] = value if fits else field.reader(fields, name, *bounds)
            elif field.default is _REQUIRED:
                own[name] = field.reader(fields, name, *field.bounds)  # raises
            else:
                own[name] = field.default
        return new


def _written(value: Any) -> Any:
    if isinstance(value, Record):
        return value.head()
    if isinstance(value, list) and value and isinstance(value[0], Record):
        return [item.head() for item in value]
    return value


class Message(Record):
    """A frame's head: a record with a kind."""

    kind = 0  # the kind of the frame
    by_kind: dict[int, type[Message]] = {}  # noqa: RUF012 - filled once, by the classes themselves

    def __init_subclass__(cls, *, kind: int = 0) -> None:
        super().__init_subclass__()
        assert kind not in Message.by_kind, f"two messages of kind {kind}"
        cls.kind = kind
        if kind:
            Message.by_kind[kind] = cls


class Request(Message):
    """A message of a request. `op` is the sender's number for the request, which DONE ends."""

    op: int = integer()


def message_of(frame: Frame) -> Message:
    """Returns the message in a frame's head. Reads it once only. Raises FrameError."""
    if frame.message is None:
        cls = Message.by_kind.get(frame.kind)
        if cls is None:
            raise FrameError(f"frame kind {frame.kind} is not expected here")
        frame.message = cls.read(frame.head)
    return frame.message


def read_listed(cls: type[R], data: bytes, max_items: int, what: str) -> list[R]:
    """Reads a JSON list of records. Raises FrameError."""
    return [cls.read(fields) for fields in Fields({what: _loaded(data, what)}).objects(what, max_items)]


def read_texts(data: bytes, max_items: int, max_chars: int, what: str) -> list[str]:
    """Reads a JSON list of texts. Raises FrameError."""
    return Fields({what: _loaded(data, what)}).texts(what, max_items, max_chars)


def read_object(cls: type[R], data: bytes, what: str) -> R:
    """Reads a record from JSON. Raises FrameError."""
    values = _loaded(data, what)
    if not isinstance(values, dict):
        raise FrameError(f"{what}: not an object")
    return cls.read(Fields(values))


def _loaded(data: bytes, what: str) -> Any:
    try:
        return loads(data)
    except NotJson as error:
        raise FrameError(f"{what}: not JSON") from error
