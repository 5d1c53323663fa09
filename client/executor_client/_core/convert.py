"""Converts wire messages to values and back.

Incoming messages are checked: an unknown enum value is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from executor_api import messages
from executor_api.limits import SAVEPOINTS_MAX
from executor_api.sizes import bytes_of
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import types_pb2 as pb
from executor_client._core.suggest import nearest
from executor_client.errors import InvalidRequest, ProtocolError
from executor_client.results import Limits, SessionInfo, StateManifest
from executor_client.savepoint import Rollback, Savepoint

T = TypeVar("T")

LIMIT_NAMES = tuple(field.name for field in dataclasses.fields(Limits))

OUTPUT_MODES = {
    "trailing_expression": pb.OUTPUT_MODE_TRAILING_EXPRESSION,
    "last_statement": pb.OUTPUT_MODE_LAST_STATEMENT,
}


def named_limits(limits: Limits | Mapping[str, float | int | str] | None) -> dict[str, Any]:
    """Returns the limits that are set, by name."""
    if isinstance(limits, Limits):
        return {name: value for name in LIMIT_NAMES if (value := getattr(limits, name)) is not None}
    return dict(limits or {})


def limits_to_wire(limits: Limits | Mapping[str, float | int | str] | None) -> pb.Limits | None:
    """Returns the limits of a request. Raises InvalidRequest for an unknown name or an invalid number."""
    if limits is None:
        return None
    asked = named_limits(limits)
    unknown = sorted(set(map(str, asked)) - set(LIMIT_NAMES))
    if unknown:
        meant = nearest(unknown[0], LIMIT_NAMES)
        asked_for = f"{', '.join(unknown)}{f' (did you mean {meant}?)' if meant else ''}"
        raise InvalidRequest(f"no such limits: {asked_for}. There are {', '.join(LIMIT_NAMES)}")
    wire = pb.Limits()
    for name, value in asked.items():
        if value is None:
            continue
        try:
            setattr(wire, name, bytes_of(value) if isinstance(value, str) and name.endswith("_bytes") else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"limits.{name} cannot be {value!r}: {error}") from error
    return wire


def from_wire(kind: type[T], wire: Message, **known: Any) -> T:
    """Returns the value in a message; `known` has the fields that the message lacks. Raises ProtocolError."""
    try:
        return messages.read(kind, wire, **known)
    except messages.Unreadable as error:
        raise ProtocolError(f"the daemon's answer is not valid: {error}") from error


def session_from_wire(wire: pb.Session) -> SessionInfo:
    return from_wire(SessionInfo, wire, detached=not wire.leased)


def state_manifest_from_wire(wire: service_pb.StateManifest) -> StateManifest:
    return from_wire(
        StateManifest,
        wire,
        omitted_variables=_reasons(wire.omitted_variables),
        omitted_files=_reasons(wire.omitted_files),
    )


def _reasons(wire: Sequence[service_pb.StateOmission]) -> dict[str, str]:
    if len(wire) > messages.LIST_MAX:
        raise ProtocolError(f"more than {messages.LIST_MAX} omissions of a state")
    return {each.name: each.reason for each in wire}


def savepoints_from_wire(wire: Sequence[service_pb.Savepoint]) -> list[Savepoint]:
    """Raises ProtocolError if there are more than a session can have."""
    if len(wire) > 2 * SAVEPOINTS_MAX:  # the branches are listed, too, and have the same limit
        raise ProtocolError(f"the daemon listed {len(wire)} savepoints")
    return [from_wire(Savepoint, each) for each in wire]


def rollback_from_wire(wire: service_pb.RollbackResponse, number: int) -> Rollback:
    """`number` was requested, 0 for the newest. Raises ProtocolError if the answer lacks it."""
    listed = savepoints_from_wire(wire.savepoints)
    found = [each for each in listed if (each.number == number if number else not each.is_branch)]
    if not found:
        wanted = f"savepoint {number}" if number else "its newest savepoint"
        raise ProtocolError(f"the daemon did not say that the session went to {wanted}")
    return from_wire(Rollback, wire, savepoint=found[-1], undone=())
