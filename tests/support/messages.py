"""Messages that no correct peer sends."""

from __future__ import annotations

from typing import Any, cast

from executor_server.guest.wire.schema import Message, Record


def raw(kind: int, head: dict[str, Any]) -> Message:
    """A message of this kind with any head at all."""
    made = type("Raw", (Record,), {"kind": kind})()
    made.__dict__.update(head)
    return cast("Message", made)
