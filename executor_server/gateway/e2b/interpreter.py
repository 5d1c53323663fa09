"""The code interpreter of a sandbox (port 49999): `/execute` streams an execution as lines of JSON.

Code runs as an execution of the session, so imports, limits, audit and the journal apply. A task for each execution
fills a bounded queue; the response drains it. A client that leaves cancels its execution. A stream ends with
`end_of_execution`, or breaks if the sandbox is gone: SDKs take a stream without that line for a success.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from executor_api.limits import CODE_BYTES_MAX, PATH_BYTES_MAX
from executor_client.aio_session import AsyncSession
from executor_client.errors import EvaluationError, ExecutorClientError
from executor_client.events import ExecutionEvent
from executor_client.results import ExecutionResult, Outcome, VariablesState
from executor_server.gateway.bodies import body_of
from executor_server.gateway.e2b import pip, results
from executor_server.gateway.e2b.contexts import DEFAULT, Contexts
from executor_server.gateway.e2b.errors import GONE, REFUSALS, not_offered, refusal_of, sandbox_gone
from executor_server.gateway.e2b.paths import HOME
from executor_server.gateway.e2b.records import Sandbox, Sandboxes
from executor_server.gateway.errors import Refusal
from executor_server.gateway.routing import current_target

KEEPALIVE_S = 5.0
"""Seconds of silence after which a line is sent, as E2B's own server does."""
WAITING_MAX = 64
"""Executions of one sandbox that run or wait for their turn."""
BODY_BYTES_MAX = 4 << 20
"""Bytes of a request. JSON may write two or three bytes of code as six."""
MESSAGE_CHARS_MAX = 16 << 20
"""Characters of an error's message. smolagents sends final answers as such messages."""

_log = structlog.get_logger(__name__)
_LINES_MAX = 8  # in the queue between an execution and its response
_END = {"type": "end_of_execution"}
_PYTHON = ("python", "python3", "py")
_SHELL = ("bash", "sh")
# Sets variables and returns their earlier values, to set them again.
_SET_ENV = """(lambda env, new: (
    {name: env.get(name) for name in new},
    [env.pop(name, None) for name, value in new.items() if value is None],
    env.update({name: value for name, value in new.items() if value is not None}),
)[0])(get_ipython().os.environ, %r)"""


_Queue = asyncio.Queue[results.Line | None]


@dataclass(frozen=True)
class _Call:
    """A request to execute code."""

    code: str
    context_id: str
    env: Mapping[str, str]


class _Lines(StreamingResponse):
    """Sends the lines of a queue that `task` fills. Lines that wait are sent together.

    After `_END` the response ends. After None it stops without an end of the body, so the client sees that it broke.
    """

    def __init__(self, queue: _Queue, task: asyncio.Task[None]) -> None:
        super().__init__((), media_type="application/x-ndjson")
        self._queue = queue
        self._task = task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._task.cancel()  # the client may have gone

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        lines: list[results.Line] = []
        line: results.Line | None = {}
        while line is not None and line is not _END:
            try:
                async with asyncio.timeout(KEEPALIVE_S):
                    line = await self._queue.get()
            except TimeoutError:
                line = {"type": "keepalive"}
            while line is not None:
                lines.append(line)
                if line is _END or self._queue.empty():
                    break
                line = self._queue.get_nowait()
            # The first line waits for the second one, and shares its message.
            if lines and lines[-1]["type"] != "number_of_executions":
                body = b"".join(map(results.encoded, lines))
                await send({"type": "http.response.body", "body": body, "more_body": line is not _END})
                lines = []


def interpreter_app(sandboxes: Sandboxes) -> Starlette:
    interpreter = _Interpreter(sandboxes)
    return Starlette(
        routes=[
            Route("/health", _health, methods=["GET"]),
            Route("/execute", interpreter.execute, methods=["POST"]),
            Route("/contexts", interpreter.list_contexts, methods=["GET"]),
            Route("/contexts", interpreter.create_context, methods=["POST"]),
            Route("/contexts/{context_id}", interpreter.remove_context, methods=["DELETE"]),
            Route("/contexts/{context_id}/restart", interpreter.restart_context, methods=["POST"]),
        ],
        exception_handlers=REFUSALS,
    )


class _Interpreter:
    """Serves the interpreters of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._states: WeakKeyDictionary[AsyncSession, _State] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()

    async def _of(self, request: Request, *, or_traffic: bool = False) -> tuple[Sandbox, _State]:
        """Returns the sandbox of a request and the state of its interpreter. Raises Refusal."""
        token = request.headers.get("x-access-token") or request.headers.get("e2b-traffic-access-token")
        sandbox = await self._sandboxes.find(current_target().sandbox_id, token, or_traffic=or_traffic)
        state = self._states.get(sandbox.session)
        if state is None:
            state = self._states[sandbox.session] = _State(Contexts(sandbox.session))
        return sandbox, state

    async def _contexts_of(self, request: Request) -> Contexts:
        _, state = await self._of(request, or_traffic=True)  # SDKs send no other token with these requests
        await state.contexts.learned()
        return state.contexts

    # Executions

    async def execute(self, request: Request) -> Response:
        sandbox, state = await self._of(request)
        call = _call(await _object(request))
        if call.context_id != DEFAULT:
            await state.contexts.learned()
            state.contexts.find(call.context_id)
        if state.waiting >= WAITING_MAX:
            raise Refusal(429, f"{WAITING_MAX} executions of this sandbox run or wait: repeat this one later")
        queue: _Queue = asyncio.Queue(_LINES_MAX)
        task = asyncio.create_task(self._run(sandbox, state, call, queue))
        state.waiting += 1
        self._tasks.add(task)  # a cancelled one outlives its response, until the daemon has cancelled the execution

        def ended(task: asyncio.Task[None]) -> None:
            state.waiting -= 1
            self._tasks.discard(task)

        task.add_done_callback(ended)
        return _Lines(queue, task)

    async def _run(self, sandbox: Sandbox, state: _State, call: _Call, queue: _Queue) -> None:
        """Puts the lines of an execution into the queue; the last one is `_END`, or None if the sandbox is gone."""
        try:
            async with state.contexts.lock:
                await self._run_in_turn(sandbox.session, state, call, queue)
        except (Refusal, ExecutorClientError) as error:
            name = "SandboxError" if isinstance(error, Refusal) else type(error).__name__
            refusal = refusal_of(error)
            await queue.put(results.failure(name, refusal.message, refusal.message))
            await queue.put(None if refusal.status == GONE else _END)
        except Exception:  # noqa: BLE001 (the border of a task of ours: the client would wait for ever)
            _log.exception("execution_failed", sandbox_id=sandbox.record.sandbox_id)
            await queue.put(results.failure("InternalError", "the gateway failed; its log has the reason"))
            await queue.put(_END)
        else:
            await queue.put(_END)

    async def _run_in_turn(self, session: AsyncSession, state: _State, call: _Call, queue: _Queue) -> None:
        async def report(event: ExecutionEvent) -> None:
            line = results.line_of(event)
            if line is not None:
                await queue.put(line)

        contexts = state.contexts
        await contexts.learn()
        context = contexts.find(call.context_id)
        context.executions += 1
        await queue.put({"type": "number_of_executions", "execution_count": context.executions})
        await contexts.enter(context)
        code = await pip.resolved(session, call.code)
        await state.restore_env(session)
        if call.env:
            state.generation, state.earlier_env = session.generation, await _set_env(session, call.env)
        contexts.running = context.context_id
        try:
            result = await session.execute(code, on_event=report)
        finally:
            contexts.running = None
        if result.succeeded:
            if result.output is not None:
                make = results.line_of_value
                small = results.is_small(result.output)
                await queue.put(make(result.output) if small else await asyncio.to_thread(make, result.output))
        else:
            await queue.put(await self._failure(session, result, code))
        await state.restore_env(session)

    async def _failure(self, session: AsyncSession, result: ExecutionResult, code: str) -> results.Line:
        """Raises Refusal or SessionGone if the sandbox is gone."""
        if result.state is VariablesState.LOST:
            raise sandbox_gone()
        if result.outcome is Outcome.CANCELLED:
            await session.refresh()  # the end of a session cancels its executions
        message = result.error.message if result.error else ""
        if result.outcome is Outcome.EXCEPTION and message.endswith("…"):
            with contextlib.suppress(EvaluationError):
                whole = await session.evaluate(f"str(get_ipython().last_exc)[:{MESSAGE_CHARS_MAX}]")
                if isinstance(whole, str) and whole.startswith(message[:-1]):
                    message = whole
        return results.line_of_failure(result, code, session.info.limits, message)

    # Contexts

    async def list_contexts(self, request: Request) -> Response:
        return JSONResponse((await self._contexts_of(request)).listed())

    async def create_context(self, request: Request) -> Response:
        contexts = await self._contexts_of(request)
        given = await _object(request)
        language = _text(given, "language", "python").lower()
        if language not in _PYTHON:
            _refuse_language(language)
        cwd = _text(given, "cwd", HOME)
        if len(cwd) > PATH_BYTES_MAX or "\0" in cwd:
            raise Refusal(400, f"cwd is a path of at most {PATH_BYTES_MAX} characters")
        return JSONResponse((await contexts.create(cwd)).described())

    async def remove_context(self, request: Request) -> Response:
        contexts = await self._contexts_of(request)
        await contexts.remove(contexts.find(request.path_params["context_id"]))
        return Response(status_code=204)

    async def restart_context(self, request: Request) -> Response:
        contexts = await self._contexts_of(request)
        await contexts.restart(contexts.find(request.path_params["context_id"]))
        return Response(status_code=204)


@dataclass
class _State:
    """The interpreter of one session."""

    contexts: Contexts
    waiting: int = 0
    earlier_env: Mapping[str, str | None] = field(default_factory=dict)
    """The environment variables that a call replaced, with their earlier values."""
    generation: int = 0
    """The interpreter in which it replaced them."""

    async def restore_env(self, session: AsyncSession) -> None:
        """Restores the environment after a call, and before the next one if that call was cancelled."""
        earlier, self.earlier_env = self.earlier_env, {}
        if earlier and self.generation == session.generation:
            await _set_env(session, earlier)


async def _health(_: Request) -> Response:
    return PlainTextResponse("OK")


# Requests


async def _object(request: Request) -> Mapping[str, Any]:
    """Returns the JSON object of a request. Raises Refusal."""
    body = await body_of(request, BODY_BYTES_MAX)
    try:
        given = json.loads(body or b"{}")
    except (RecursionError, ValueError) as error:
        raise Refusal(400, f"the request is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise Refusal(400, "the request is a JSON object")
    return given


def _call(given: Mapping[str, Any]) -> _Call:
    code = _text(given, "code")
    if len(code.encode(errors="replace")) > CODE_BYTES_MAX:
        raise Refusal(413, f"the code has more than {CODE_BYTES_MAX} bytes: write it to a file and import it")
    context_id, language = _text(given, "context_id", ""), _text(given, "language", "").strip().lower()
    if context_id and language:
        raise Refusal(400, "Only one of context_id or language can be provided")
    if language in _SHELL:
        code = f"%%bash\n{code}"
    elif language and language not in _PYTHON:
        _refuse_language(language)
    elif code.lstrip("\n")[:1] in (" ", "\t"):
        code = textwrap.dedent(code)  # as IPython does
    return _Call(code, context_id or DEFAULT, _env(given))


def _text(given: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = given.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise Refusal(400, f"{name} is a text, not {type(value).__name__}")
    return value


def _env(given: Mapping[str, Any]) -> Mapping[str, str]:
    env = given.get("env_vars")
    if env is None:
        return {}
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise Refusal(400, "env_vars is an object whose values are texts")
    if any(not name or "=" in name or "\0" in name + value for name, value in env.items()):
        raise Refusal(400, "env_vars has a name or a value that no environment can have")
    return env


def _refuse_language(language: str) -> NoReturn:
    raise not_offered(f"the language {language[:32]!r}", "the interpreter runs python, and bash in steps of their own")


async def _set_env(session: AsyncSession, env: Mapping[str, str | None]) -> dict[str, str | None]:
    """Sets environment variables of the interpreter; returns their earlier values. Raises Refusal."""
    try:
        earlier = await session.evaluate(_SET_ENV % dict(env))
    except EvaluationError as error:
        raise Refusal(403, f"env_vars could not be set: {error.message}") from error
    if not isinstance(earlier, dict):  # it comes from agent code
        return {}
    return {name: value for name in env if isinstance(value := earlier.get(name), str | None)}
