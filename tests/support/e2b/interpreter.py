"""The code interpreter in each sandbox of the cloud: contexts, each with a Python process of its own that stays."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.e2b.answers import REORDER_WAIT_S, ApiError, Outgoing
from tests.support.e2b.machine import PLACE, Machine, MachineError, Subscriber

DEFAULT = "default"
KEEPALIVE_S = 5.0
CONTEXTS_MAX = 32
LINE_BYTES_MAX = 64 * 2**20


@dataclass
class Context:
    """One interpreter; started when it is first asked something, and again when it ended."""

    context_id: str
    language: str = "python"
    cwd: str = "/home/user"
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    pid: int | None = None
    subscriber: Subscriber | None = None
    requests: int = 0
    buffer: bytearray = field(default_factory=bytearray)

    @property
    def described(self) -> dict[str, str]:
        return {"id": self.context_id, "language": self.language, "cwd": self.cwd}


async def answer(
    request: web.BaseRequest, out: Outgoing, machine: Machine, contexts: dict[str, Context]
) -> web.StreamResponse:
    contexts.setdefault(DEFAULT, Context(DEFAULT))
    steps = request.path.strip("/").split("/")
    match request.method, steps:
        case "GET", ["health"]:
            return web.json_response("OK")
        case "POST", ["execute"]:
            return await _execute(out, machine, contexts, await _asked(request))
        case "GET", ["contexts"]:
            return web.json_response([context.described for context in contexts.values()])
        case "POST", ["contexts"]:
            if len(contexts) >= CONTEXTS_MAX:
                raise ApiError(400, f"there are {CONTEXTS_MAX} contexts")
            asked = await _asked(request)
            _require_python(asked.get("language"))
            number = len(contexts)
            while f"context-{number}" in contexts:
                number += 1
            context = Context(f"context-{number}", cwd=asked.get("cwd") or "/home/user")
            contexts[context.context_id] = context
            return web.json_response(context.described)
        case "DELETE", ["contexts", context_id]:
            await _stop(machine, _known(contexts, context_id))
            del contexts[context_id]
            return web.Response(status=204)
        case "POST", ["contexts", context_id, "restart"]:
            await _stop(machine, _known(contexts, context_id))
            return web.Response(status=204)
    raise ApiError(404, f"no {request.method} {request.path}")


async def _execute(
    out: Outgoing, machine: Machine, contexts: dict[str, Context], asked: dict[str, Any]
) -> web.StreamResponse:
    if asked.get("context_id") and asked.get("language"):
        raise ApiError(400, "Only one of context_id or language can be provided")
    _require_python(asked.get("language"))
    context = _known(contexts, asked.get("context_id") or DEFAULT)
    async with context.turn:
        if context.pid is None:
            await _start(machine, context)
        context.requests += 1
        number = context.requests
        request = json.dumps({"n": number, "code": asked.get("code", ""), "env_vars": asked.get("env_vars")}) + "\n"
        await out.begin("application/json")
        try:
            await machine.ask("input", pid=context.pid, data=base64.b64encode(request.encode()).decode())
            await _relay(out, context, number)
        except BaseException:
            # The caller has gone. Later output has this request's number, which the next one ignores.
            if context.pid is not None and not machine.has_ended:
                await asyncio.shield(_interrupt(machine, context.pid))
            raise
        return await out.end()


async def _relay(out: Outgoing, context: Context, number: int) -> None:
    while True:
        event = await _event(context, REORDER_WAIT_S if out.holds else KEEPALIVE_S)
        if event is None:
            if out.holds:
                await out.flush()
            else:
                await out.send(_line({"type": "keepalive"}))
        elif event.pop("n") == number:
            is_end = event["type"] == "end_of_execution"
            await out.send(_line(event), is_last=is_end)
            if is_end:
                return


async def _event(context: Context, wait_s: float) -> dict[str, Any] | None:
    """Returns the next line of the interpreter; None at the timeout."""
    while (at := context.buffer.find(b"\n")) < 0:
        assert context.subscriber is not None
        try:
            async with asyncio.timeout(wait_s):
                output = await context.subscriber.events.get()
        except TimeoutError:
            return None
        if output is None or "end" in output:
            _forget(context)
            context.buffer += _line({"n": context.requests, **_DIED}) + _line(
                {"n": context.requests, "type": "end_of_execution"}
            )
        elif "stdout" in output:
            context.buffer += base64.b64decode(output["stdout"])
        if len(context.buffer) > LINE_BYTES_MAX:
            raise ApiError(500, "the interpreter writes a line without end")
    line = bytes(context.buffer[:at])
    del context.buffer[: at + 1]
    event: dict[str, Any] = json.loads(line)
    return event


_DIED = {
    "type": "error",
    "name": "ExecutionError",
    "value": "The interpreter ended while it executed",
    "traceback": "",
}


async def _start(machine: Machine, context: Context) -> None:
    context.buffer.clear()
    context.pid, context.subscriber = await machine.start_command(
        cmd=sys.executable,
        args=["-I", "-u", f"{PLACE}/inside/kernel.py"],
        envs={},
        cwd=context.cwd,
        stdin=True,
        user="user",
    )


async def _stop(machine: Machine, context: Context) -> None:
    if context.pid is not None:
        pid, subscriber = context.pid, context.subscriber
        _forget(context)
        assert subscriber is not None
        machine.unsubscribe(pid, subscriber)
        await machine.ask("signal", pid=pid, signal=signal.SIGKILL)


async def _interrupt(machine: Machine, pid: int) -> None:
    try:
        await machine.ask("signal", pid=pid, signal=signal.SIGINT)
    except MachineError as error:
        if error.code != "not_found":  # it ended in the same moment
            raise


def _forget(context: Context) -> None:
    context.pid = context.subscriber = None


def _known(contexts: dict[str, Context], context_id: str) -> Context:
    context = contexts.get(context_id)
    if context is None:
        raise ApiError(404, f"Context {context_id} not found")
    return context


def _require_python(language: str | None) -> None:
    if language not in (None, "python"):
        raise ApiError(500, f"no kernel for {language}")


async def _asked(request: web.BaseRequest) -> dict[str, Any]:
    try:
        asked = json.loads(await request.read() or b"{}")
    except ValueError:
        raise ApiError(400, "the body is no JSON") from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body is no object")
    return asked


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode() + b"\n"
