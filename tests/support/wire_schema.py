"""The schema of the guest channel as text: what is compared with the snapshot of its version.

python -m tests.support.wire_schema     writes the snapshot of the version that is in force now
"""

from __future__ import annotations

from pathlib import Path

from executor_server.guest.wire import messages, session_rules
from executor_server.guest.wire.frames import PROTOCOL_VERSION
from executor_server.guest.wire.schema import _REQUIRED, Field, Message, Record

SNAPSHOT = Path(__file__).parents[1] / "unit" / "guest" / "wire" / f"schema_{PROTOCOL_VERSION}.txt"

RECORDS: dict[str, type[Record]] = {
    name: cls
    for module in (session_rules, messages)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, Record)
}


def schema() -> str:
    """Each message and each object within one, its fields in their order, with type, bounds and default."""
    lines = [f"protocol {PROTOCOL_VERSION}"]
    for name, cls in RECORDS.items():
        if cls not in (Record, Message):
            lines += ["", f"{name} = {cls.kind}" if issubclass(cls, Message) else name]
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
    SNAPSHOT.write_text(schema())
