"""Reads whole bodies of requests."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from executor_api.json_size import JSON_VALUES_MAX, has_too_many_values
from executor_server.gateway.errors import Refusal

PROBLEMS_MAX = 10

M = TypeVar("M", bound=BaseModel)


async def body_of(request: Request, bytes_max: int, *, too_large: int = 413) -> bytes:
    """Raises Refusal for a body that is too large, with the status `too_large`, and (400) if the client leaves."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > bytes_max:
                raise Refusal(too_large, f"the request has more than {bytes_max:,} bytes")
    except ClientDisconnect as error:
        raise Refusal(400, "the request broke off") from error
    return bytes(body)


async def json_of(request: Request, kind: type[M], bytes_max: int, *, too_large: int = 413) -> M:
    """Reads a JSON object; an empty body counts as `{}`. Raises Refusal, with 400 if the object is not of this kind."""
    body = await body_of(request, bytes_max, too_large=too_large)
    if has_too_many_values(body):
        raise Refusal(400, f"the request has more than {JSON_VALUES_MAX:,} values")
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise refusal_of_values(error) from None


def refusal_of_values(error: ValidationError) -> Refusal:
    """Returns the refusal (400) of a body or a query; it names the first values that do not fit."""
    found = error.errors(include_url=False, include_input=False)[:PROBLEMS_MAX]
    problems = [f"{'.'.join(map(str, each['loc'])) or 'the body'}: {each['msg']}" for each in found]
    return Refusal(400, "; ".join(problems))
