"""The code interpreter in each sandbox of the cloud."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from tests.support.e2b.answers import ApiError, Outgoing
from tests.support.e2b.machine import Machine


@dataclass
class Context:
    context_id: str


async def answer(
    request: web.BaseRequest, out: Outgoing, machine: Machine, contexts: dict[str, Context]
) -> web.StreamResponse:
    raise ApiError(404, f"no {request.method} {request.path}")
