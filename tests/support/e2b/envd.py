"""The daemon in each sandbox of the cloud: uploads and commands, over HTTP and Connect. Our backend uses no more."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import signal
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.e2b.answers import REORDER_WAIT_S, ApiError, Outgoing, connect_error
from tests.support.e2b.machine import Machine, MachineError, Subscriber

KEEPALIVE_DEFAULT_S = 90.0
MESSAGE_BYTES_MAX = 8 * 2**20
READ_BYTES = 64 * 1024
END_FLAG = 0x02
WRONG_BY = 100_000
SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL}
_STATUS_OF_CODE = {"not_found": 404, "unauthenticated": 401, "invalid_argument": 400, "resource_exhausted": 507}


async def answer(request: web.BaseRequest, out: Outgoing, machine: Machine) -> web.StreamResponse:
    match request.method, request.path:
        case "GET", "/health":
            return web.Response(status=204)
        case "POST", "/files":
            return await _upload(request, machine)
        case "POST", "/process.Process/Start":
            return await _start(request, out, machine)
        case "POST", path if path in _UNARY:
            try:
                asked = json.loads(await request.read())
            except ValueError:
                raise MachineError("invalid_argument", "the body is no JSON") from None
            return web.json_response(await _UNARY[path](asked, machine))
        case "POST", path if path.startswith("/process."):
            return connect_error("unimplemented", f"{path} is not implemented")
    raise ApiError(404, f"no {request.method} {request.path}")


# ---------------------------------------------------------------------------------------------------------------------
# Files


async def _upload(request: web.BaseRequest, machine: Machine) -> web.Response:
    user, path = request.query.get("username", "user"), request.query.get("path")
    written = []
    try:
        if request.content_type == "multipart/form-data":
            parts = aiohttp.MultipartReader(request.headers, request.content)
            while (part := await parts.next()) is not None:
                if isinstance(part, aiohttp.BodyPartReader) and part.name == "file":
                    place = path or _file_name(part)
                    written.append(await machine.write_file(place, user, _pieces_of(part)))
        else:
            written.append(await machine.write_file(path or "", user, request.content.iter_chunked(READ_BYTES)))
    except MachineError as error:
        raise ApiError(_STATUS_OF_CODE.get(error.code, 500), str(error)) from error
    if not written:
        raise ApiError(400, "no file in the request")
    return web.json_response(written)


def _file_name(part: aiohttp.BodyPartReader) -> str:
    """Returns the name with its directories, which parsers of this header remove for safety."""
    found = re.search(r'filename="([^"]*)"', part.headers.get("Content-Disposition", ""))
    return urllib.parse.unquote(found[1]) if found else ""


async def _pieces_of(part: aiohttp.BodyPartReader) -> AsyncIterator[bytes]:
    while piece := await part.read_chunk(READ_BYTES):
        yield piece


# ---------------------------------------------------------------------------------------------------------------------
# Commands


async def _start(request: web.BaseRequest, out: Outgoing, machine: Machine) -> web.StreamResponse:
    asked = await _first_message(request)
    process = asked.get("process") or {}
    pid, subscriber = await machine.start_command(
        cmd=process.get("cmd", ""),
        args=process.get("args", []),
        envs=process.get("envs", {}),
        cwd=process.get("cwd"),
        tag=asked.get("tag"),
        stdin=asked.get("stdin", True),
        user=_user(request),
    )
    return await _relay(request, out, machine, pid, subscriber)


async def _relay(
    request: web.BaseRequest, out: Outgoing, machine: Machine, pid: int, subscriber: Subscriber
) -> web.StreamResponse:
    """Streams what the command writes until its end. At the client's deadline the command that it started is killed."""
    loop = asyncio.get_running_loop()
    limit_s = _limit(request)
    deadline = loop.time() + limit_s if limit_s is not None else None
    keepalive_s = float(request.headers.get("Keepalive-Ping-Interval", KEEPALIVE_DEFAULT_S))
    try:
        response = await out.begin(
            "application/connect+json", noise=lambda data: _event({"data": _output("stdout", data)})
        )
        await out.send(_event({"start": {"pid": pid + WRONG_BY if out.lies else pid}}))
        while True:
            wait_s = REORDER_WAIT_S if out.holds else keepalive_s
            left_s = deadline - loop.time() if deadline is not None else wait_s
            event = await _next(subscriber, machine, min(wait_s, left_s))
            if event is not None:
                is_end = "end" in event
                payload = {"end": event["end"]} if is_end else {"data": {k: event[k] for k in event if k != "pid"}}
                await out.send(_event(payload), is_last=is_end)
                if is_end:
                    await out.end(_frame({}, END_FLAG))
                    return response
            elif deadline is not None and loop.time() >= deadline:
                await machine.ask("signal", pid=pid, signal=signal.SIGKILL)
                error = {"code": "deadline_exceeded", "message": "the deadline of the request has come"}
                await out.end(_frame({"error": error}, END_FLAG))
                return response
            elif out.holds:
                await out.flush()
            else:
                await out.send(_event({"keepalive": {}}))
    finally:
        machine.unsubscribe(pid, subscriber)


async def _next(subscriber: Subscriber, machine: Machine, wait_s: float) -> dict[str, Any] | None:
    """Returns the next event; None at the timeout. Raises ConnectionError when the sandbox ended."""
    getting, ending = asyncio.ensure_future(subscriber.events.get()), asyncio.ensure_future(machine.wait_end())
    try:
        await asyncio.wait((getting, ending), timeout=max(0.0, wait_s), return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        if ending.done():
            raise ConnectionResetError("the sandbox has ended")
        return None
    finally:
        getting.cancel()
        ending.cancel()


async def _send_input(asked: dict[str, Any], machine: Machine) -> dict[str, Any]:
    await machine.ask("input", pid=_selected(asked), data=(asked.get("input") or {}).get("stdin") or "")
    return {}


async def _send_signal(asked: dict[str, Any], machine: Machine) -> dict[str, Any]:
    number = SIGNALS.get(asked.get("signal", ""))
    if number is None:
        raise MachineError("unimplemented", f"invalid signal: {asked.get('signal')}")
    await machine.ask("signal", pid=_selected(asked), signal=number)
    return {}


def _selected(asked: dict[str, Any]) -> int:
    try:
        return int(asked["process"]["pid"])
    except (KeyError, TypeError, ValueError):
        raise MachineError("not_found", f"no process is {asked.get('process')}") from None


_UNARY: dict[str, Callable[[dict[str, Any], Machine], Awaitable[dict[str, Any]]]] = {
    "/process.Process/SendInput": _send_input,
    "/process.Process/SendSignal": _send_signal,
}


# ---------------------------------------------------------------------------------------------------------------------
# Connect


def _frame(message: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


def _event(event: dict[str, Any]) -> bytes:
    return _frame({"event": event})


def _output(name: str, data: bytes) -> dict[str, str]:
    return {name: base64.b64encode(data).decode()}


async def _first_message(request: web.BaseRequest) -> dict[str, Any]:
    message = await _message(request)
    if message is None:
        raise MachineError("invalid_argument", "the stream has no message")
    return message


async def _message(request: web.BaseRequest) -> dict[str, Any] | None:
    """Returns the next message of a request's stream; None at its end."""
    try:
        head = await request.content.readexactly(5)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise MachineError("invalid_argument", "the stream ends in a message") from error
        return None
    size = int.from_bytes(head[1:], "big")
    if size > MESSAGE_BYTES_MAX:
        raise MachineError("resource_exhausted", f"a message of {size} bytes")
    data = await request.content.readexactly(size)
    if head[0] & END_FLAG:
        return None
    try:
        message = json.loads(data)
    except ValueError:
        raise MachineError("invalid_argument", "a message is no JSON") from None
    if not isinstance(message, dict):
        raise MachineError("invalid_argument", "a message is no object")
    return message


def _user(request: web.BaseRequest) -> str:
    scheme, _, word = request.headers.get("Authorization", "").partition(" ")
    if scheme != "Basic":
        return "user"
    try:
        return base64.b64decode(word, validate=True).decode().partition(":")[0] or "user"
    except (binascii.Error, UnicodeDecodeError):
        raise MachineError("unauthenticated", "the Authorization header is malformed") from None


def _limit(request: web.BaseRequest) -> float | None:
    try:
        return int(request.headers["Connect-Timeout-Ms"]) / 1000
    except (KeyError, ValueError):
        return None
