"""Answers for parts of the gateway that do not exist yet."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp


def not_there_yet(part: str) -> ASGIApp:
    return JSONResponse({"code": 501, "message": f"{part} is not there yet"}, 501)
