"""The daemon in each sandbox of the cloud: files, commands and the file system, over HTTP and Connect."""

from __future__ import annotations

import asyncio
import base64
import binascii
import datetime
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
        case "GET", "/files":
            return await _download(request, out, machine)
        case "POST", "/files":
            return await _upload(request, machine)
        case "POST", "/process.Process/Start":
            return await _start(request, out, machine)
        case "POST", "/process.Process/Connect":
            return await _connect(request, out, machine)
        case "POST", "/process.Process/StreamInput":
            return await _stream_input(request, out, machine)
        case "POST", path if path in _UNARY:
            try:
                asked = json.loads(await request.read())
            except ValueError:
                raise MachineError("invalid_argument", "the body is no JSON") from None
            return web.json_response(await _UNARY[path](asked, _user(request), machine))
        case "POST", path if path.startswith(("/process.", "/filesystem.")):
            return connect_error("unimplemented", f"{path} is not implemented")
    raise ApiError(404, f"no {request.method} {request.path}")


# ---------------------------------------------------------------------------------------------------------------------
# Files


async def _download(request: web.BaseRequest, out: Outgoing, machine: Machine) -> web.StreamResponse:
    try:
        pieces = await machine.read_file(request.query.get("path", ""), request.query.get("username", "user"))
    except MachineError as error:
        raise ApiError(_STATUS_OF_CODE.get(error.code, 500), str(error)) from error
    # Without a length: a file that grows meanwhile, or that reports none as those of /proc do, is sent to its end.
    response = await out.begin("application/octet-stream")
    async for piece in pieces:
        await out.send(piece)
    await out.end()
    return response


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
        pty=(asked.get("pty") or {}).get("size"),
        user=_user(request),
    )
    return await _relay(request, out, machine, pid, subscriber, kill_late=True)


async def _connect(request: web.BaseRequest, out: Outgoing, machine: Machine) -> web.StreamResponse:
    pid = await _selected(await _first_message(request), machine)
    return await _relay(request, out, machine, pid, machine.subscribe(pid), kill_late=False)


async def _relay(
    request: web.BaseRequest, out: Outgoing, machine: Machine, pid: int, subscriber: Subscriber, *, kill_late: bool
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
                if kill_late:
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


async def _stream_input(request: web.BaseRequest, out: Outgoing, machine: Machine) -> web.StreamResponse:
    pid: int | None = None
    while (message := await _message(request)) is not None:
        if "start" in message:
            pid = await _selected(message["start"], machine)
        elif "data" in message:
            if pid is None:
                raise MachineError("invalid_argument", "data came before the start")
            await _write_input(pid, message["data"].get("input") or {}, machine)
    await out.begin("application/connect+json")
    await out.send(_frame({}))
    return await out.end(_frame({}, END_FLAG))


async def _list(_: dict[str, Any], __: str, machine: Machine) -> dict[str, Any]:
    found = []
    for one in await machine.ask("list"):
        config = {name: one[name] for name in ("cmd", "args", "envs", "cwd") if one[name] is not None}
        found.append({"config": config, "pid": one["pid"], **({"tag": one["tag"]} if one["tag"] else {})})
    return {"processes": found}


async def _send_input(asked: dict[str, Any], _: str, machine: Machine) -> dict[str, Any]:
    await _write_input(await _selected(asked, machine), asked.get("input") or {}, machine)
    return {}


async def _write_input(pid: int, given: dict[str, Any], machine: Machine) -> None:
    await machine.ask("input", pid=pid, data=given.get("stdin") or given.get("pty") or "")


async def _send_signal(asked: dict[str, Any], _: str, machine: Machine) -> dict[str, Any]:
    number = SIGNALS.get(asked.get("signal", ""))
    if number is None:
        raise MachineError("unimplemented", f"invalid signal: {asked.get('signal')}")
    await machine.ask("signal", pid=await _selected(asked, machine), signal=number)
    return {}


async def _close_stdin(asked: dict[str, Any], _: str, machine: Machine) -> dict[str, Any]:
    await machine.ask("close_input", pid=await _selected(asked, machine))
    return {}


async def _update(asked: dict[str, Any], _: str, machine: Machine) -> dict[str, Any]:
    if size := (asked.get("pty") or {}).get("size"):
        await machine.ask("resize", pid=await _selected(asked, machine), size=size)
    return {}


async def _selected(asked: dict[str, Any], machine: Machine) -> int:
    selector = asked.get("process") or {}
    if "pid" in selector:
        return int(selector["pid"])
    for one in await machine.ask("list"):
        if one["tag"] and one["tag"] == selector.get("tag"):
            return int(one["pid"])
    raise MachineError("not_found", f"no process is {selector}")


# ---------------------------------------------------------------------------------------------------------------------
# The file system


async def _stat(asked: dict[str, Any], user: str, machine: Machine) -> dict[str, Any]:
    return {"entry": _entry(await machine.ask("stat", path=asked.get("path", ""), user=user))}


async def _make_dir(asked: dict[str, Any], user: str, machine: Machine) -> dict[str, Any]:
    return {"entry": _entry(await machine.ask("make_dir", path=asked.get("path", ""), user=user))}


async def _move(asked: dict[str, Any], user: str, machine: Machine) -> dict[str, Any]:
    source, destination = asked.get("source", ""), asked.get("destination", "")
    return {"entry": _entry(await machine.ask("move", source=source, destination=destination, user=user))}


async def _list_dir(asked: dict[str, Any], user: str, machine: Machine) -> dict[str, Any]:
    found = await machine.ask("list_dir", path=asked.get("path", ""), depth=asked.get("depth", 1), user=user)
    return {"entries": [_entry(one) for one in found]}


async def _remove(asked: dict[str, Any], user: str, machine: Machine) -> dict[str, Any]:
    await machine.ask("remove", path=asked.get("path", ""), user=user)
    return {}


def _entry(found: dict[str, Any]) -> dict[str, Any]:
    entry = dict(found)
    modified = datetime.datetime.fromtimestamp(entry.pop("modified_s"), datetime.UTC)
    entry["modifiedTime"] = modified.isoformat().replace("+00:00", "Z")
    return entry


_UNARY: dict[str, Callable[[dict[str, Any], str, Machine], Awaitable[dict[str, Any]]]] = {
    "/process.Process/List": _list,
    "/process.Process/SendInput": _send_input,
    "/process.Process/SendSignal": _send_signal,
    "/process.Process/CloseStdin": _close_stdin,
    "/process.Process/Update": _update,
    "/filesystem.Filesystem/Stat": _stat,
    "/filesystem.Filesystem/MakeDir": _make_dir,
    "/filesystem.Filesystem/Move": _move,
    "/filesystem.Filesystem/ListDir": _list_dir,
    "/filesystem.Filesystem/Remove": _remove,
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
