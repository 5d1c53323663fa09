"""Calls of a front to its nodes, one by one or all at once, on the links' own connections."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

import structlog
from google.protobuf import message_factory
from google.protobuf.message import Message

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as service_pb
from executor_server.api.errors import PassedOn
from executor_server.core import ExecutorError, Principal
from executor_server.fleet.api.node_calls import answer_of, metadata_for

T = TypeVar("T", bound=Message)

ASK_TIME_S = 3.0
"""Seconds for a node to answer what all nodes are asked; one that takes longer is left out."""

_log = structlog.get_logger(__name__)


class Asked(Protocol):
    """The way to one node."""

    node: str

    @property
    def channel(self) -> Any: ...


def _paths() -> dict[str, tuple[str, Any]]:
    """The path and the class of the answer of each method, by its name; no two of our services share one."""
    return {
        method.name: (f"/{service.full_name}/{method.name}", message_factory.GetMessageClass(method.output_type))
        for file in (service_pb.DESCRIPTOR, admin_pb.DESCRIPTOR)
        for service in file.services_by_name.values()
        for method in service.methods
    }


_METHODS = _paths()


async def ask(link: Asked, method: str, request: Message, principal: Principal, time_s: float | None) -> Any:
    """Returns the answer of a node to a call with one message. Raises RefusedByNode, ExecutorError."""
    path, answer_class = _METHODS[method]
    send = link.channel.unary_unary(
        path,
        request_serializer=lambda message: cast("bytes", message.SerializeToString()),
        response_deserializer=answer_class.FromString,
    )
    call = send(request, metadata=cast("Any", metadata_for(principal)), timeout=time_s)
    return await answer_of(cast("Any", call), link.node)


async def ask_all(
    links: Sequence[Asked], method: str, request: Message, principal: Principal, time_s: float = ASK_TIME_S
) -> list[tuple[str, Any]]:
    """Returns the answers of all nodes that answer in time, with their names."""
    answers = await answers_of(links, method, request, principal, time_s)
    return [
        (link.node, answer)
        for link, answer in zip(links, answers, strict=True)
        if not isinstance(answer, (ExecutorError, PassedOn))
    ]


async def answers_of(
    links: Sequence[Asked], method: str, request: Message, principal: Principal, time_s: float = ASK_TIME_S
) -> list[Any]:
    """Returns the answer of each node, or the ExecutorError or RefusedByNode in its place."""

    async def one(link: Asked) -> Any:
        try:
            return await ask(link, method, request, principal, time_s)
        except (ExecutorError, PassedOn) as error:
            _log.info("fleet_node_left_out", node=link.node, method=method, problem=str(error))
            return error

    return await asyncio.gather(*map(one, links))
