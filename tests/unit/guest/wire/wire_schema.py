"""The schemas of the guest's messages as text, to be compared with their snapshots.

python -m tests.unit.guest.wire.wire_schema     writes the snapshots: that of the channel for the version in force now
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from executor_server.guest.wire import (
    file_changes,
    link_messages,
    messages,
    process_messages,
    savepoint_messages,
    session_rules,
)
from executor_server.guest.wire.frames import PROTOCOL_VERSION
from executor_server.guest.wire.link_messages import LinkMessage
from executor_server.guest.wire.schema import _REQUIRED, Field, Message, Record

_SNAPSHOTS = Path(__file__).parent
CHANNEL_SNAPSHOT = _SNAPSHOTS / f"schema_{PROTOCOL_VERSION}.txt"
LINK_SNAPSHOT = _SNAPSHOTS / "schema_of_links.txt"


def _records(*modules: ModuleType) -> list[type[Record]]:
    """The messages and objects that these modules define."""
    names = {module.__name__ for module in modules}
    found = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    return [cls for cls in found if issubclass(cls, Record) and cls.__module__ in names and cls is not LinkMessage]


CHANNEL_RECORDS = _records(session_rules, messages, process_messages, file_changes, savepoint_messages)
LINK_RECORDS = _records(link_messages)


def channel_schema() -> str:
    return _schema(f"protocol {PROTOCOL_VERSION}", CHANNEL_RECORDS)


def link_schema() -> str:
    return _schema("links between the supervisor and its children", LINK_RECORDS)


def _schema(title: str, records: list[type[Record]]) -> str:
    """Each message and each object within one, its fields in their order, with type, bounds and default."""
    lines = [title]
    for cls in records:
        lines += ["", f"{cls.__name__} = {cls.kind}" if issubclass(cls, (Message, LinkMessage)) else cls.__name__]
        lines += [f"    {field_name}: {_form(field)}" for field_name, field in cls.fields.items()]
    return "\n".join([*lines, ""])


def _form(field: Field) -> str:
    bounds = ", ".join(_bound(bound) for bound in field.bounds)
    form = f"{field.reader.__name__.removeprefix('_read_')}({bounds})"
    return form if field.default is _REQUIRED else f"{form} = {field.default!r}"


def _bound(bound: object) -> str:
    if isinstance(bound, frozenset):
        return " | ".join(sorted(bound))
    return bound.__name__ if isinstance(bound, type) else str(bound)


if __name__ == "__main__":
    CHANNEL_SNAPSHOT.write_text(channel_schema())
    LINK_SNAPSHOT.write_text(link_schema())
