"""Names of the sessions behind a front: tests call them by short ones, which no node of a fleet could give them.

`renaming` puts ids of a fleet in their place where a call comes in, and the names where its answer goes out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.handlers import OWN_METHODS, Handler, Wrapper
from executor_server.fleet.membership import node_of
from tests.support.fleet_daemon import NODES

EPOCH = 1

# A name fits the random part of an id.
_NAME = re.compile(r"[a-z0-9-]{1,12}")


class Placed(Protocol):
    """A session; `node` is empty for one that no node has seen yet."""

    node: str


def fleet_id(name: str, node: str) -> str:
    """Returns the id of a fleet for the session that tests call `name`."""
    assert _NAME.fullmatch(name), f"an id has no room for {name!r}: a session's name must be 1 to 12 of a-z 0-9 -"
    return f"{node}-{EPOCH:08x}{name.encode().hex():0<24}"


def name_of(session_id: str) -> str:
    """Returns what tests call the session; any other text as it is."""
    if node_of(session_id) is None:
        return session_id
    return bytes.fromhex(session_id[-24:]).rstrip(b"\0").decode()


def renaming(sessions: Mapping[str, Placed]) -> Wrapper:
    """Replaces names of `sessions`, those of the test, in requests, and their ids in answers. Other bytes stay."""

    def id_of(name: str) -> str:
        if not _NAME.fullmatch(name):
            return name
        session = sessions.get(name)
        return fleet_id(name, (session.node if session is not None else "") or NODES[0])

    def wrap(method: str, handler: Handler) -> Handler:
        if method not in OWN_METHODS:
            return handler
        request_class, answer_class = _MESSAGES[method]
        parse, serialize = handler.request_deserializer, handler.response_serializer

        def incoming(data: bytes) -> Any:
            renamed = _renamed(request_class, data, id_of)
            return parse(renamed) if parse is not None else renamed

        def outgoing(answer: Any) -> bytes:
            return _renamed(answer_class, serialize(answer) if serialize is not None else answer, name_of)

        made = cast("Any", handler)._replace(request_deserializer=incoming, response_serializer=outgoing)
        return cast("Handler", made)

    return wrap


_MESSAGES = {
    f"/{service.full_name}/{method.name}": (
        message_factory.GetMessageClass(method.input_type),
        message_factory.GetMessageClass(method.output_type),
    )
    for file in (service_pb.DESCRIPTOR, admin_pb.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


def _renamed(message_class: type[Message], data: bytes, rename: Callable[[str], str]) -> bytes:
    try:
        message = message_class.FromString(data)
    except DecodeError:
        return data
    return message.SerializeToString() if _rename_in(message, rename) else data


def _rename_in(message: Any, rename: Callable[[str], str]) -> bool:
    """Returns True when it has changed something."""
    changed = False
    for field, value in message.ListFields():
        if field.name == "session_id":
            new = rename(value)
            changed |= new != value
            message.session_id = new
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            parts = value if field.is_repeated else [value]
            for part in parts:
                changed |= _rename_in(part, rename)
    return changed
