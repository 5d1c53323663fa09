"""The code interpreter of a sandbox (port 49999): `/execute` streams an execution as lines of JSON.

Code runs as an execution of the session, so imports, limits, audit and the journal apply. A client that leaves cancels
its execution, and one that reads slowly slows it down. A stream ends with `end_of_execution`, or breaks if the sandbox
is gone: SDKs take a stream without that line for a success.
"""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import time
from collections.abc import Collection
from typing import Annotated

import structlog
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from executor_api.limits import CODE_BYTES_MAX, PATH_BYTES_MAX
from executor_client.errors import EvaluationError, ExecutorClientError
from executor_client.events import ExecutionEvent
from executor_client.results import ExecutionResult, Outcome, VariablesState
from executor_server.gateway.bodies import json_of
from executor_server.gateway.e2b import pip, results
from executor_server.gateway.e2b.contexts import DEFAULT, Contexts
from executor_server.gateway.e2b.errors import GONE, REFUSALS, not_offered, refusal_of, sandbox_gone
from executor_server.gateway.e2b.paths import HOME
from executor_server.gateway.e2b.records import Sandboxes
from executor_server.gateway.errors import Refusal
from executor_server.gateway.leaving import EndsWithClient
from executor_server.gateway.routing import StreamCut, current_target

KEEPALIVE_S = 5.0
"""Seconds of silence after which a line is sent, as E2B's own server does."""
WAITING_MAX = 64
"""Executions of one sandbox that run or wait for their turn."""
BODY_BYTES_MAX = 4 << 20
"""Bytes of a request. JSON may write two or three bytes of code as six."""
MESSAGE_CHARS_MAX = 16 << 20
"""Characters of an error's message. smolagents sends final answers as such messages."""

_log = structlog.get_logger(__name__)
_PYTHON = ("python", "python3", "py")
_SHELL = ("bash", "sh")


def _name_of_env(name: str) -> str:
    if not name or "=" in name or "\0" in name:
        raise ValueError("no environment can have this name")
    return name


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Code(_Body):
    """A request to execute code."""

    code: str
    context_id: str | None = None
    language: str | None = None
    env: dict[Annotated[str, AfterValidator(_name_of_env)], Annotated[str, Field(pattern="^[^\0]*$")]] | None = Field(
        None, alias="env_vars"
    )

    def python(self) -> str:
        """Returns it as Python. Raises Refusal."""
        if len(self.code.encode()) > CODE_BYTES_MAX:
            raise Refusal(413, f"the code has more than {CODE_BYTES_MAX} bytes: write it to a file and import it")
        if self.context_id and self.language:
            raise Refusal(400, "Only one of context_id or language can be provided")
        if _language(self.language, (*_PYTHON, *_SHELL)) in _SHELL:
            return f"%%bash\n{self.code}"
        if self.code.lstrip("\n")[:1] in (" ", "\t"):
            return textwrap.dedent(self.code)  # as IPython does
        return self.code


class _NewContext(_Body):
    language: str | None = None
    cwd: str | None = Field(None, max_length=PATH_BYTES_MAX, pattern="^[^\0]*$")


def interpreter_app(sandboxes: Sandboxes) -> ASGIApp:
    interpreter = _Interpreter(sandboxes)
    return EndsWithClient(
        Starlette(
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
    )


class _Interpreter:
    """Serves the interpreters of all sandboxes."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def _of(self, request: Request, *, or_traffic: bool = False) -> Contexts:
        """Returns the contexts of the sandbox. Raises Refusal."""
        token = request.headers.get("x-access-token") or request.headers.get("e2b-traffic-access-token")
        return (await self._sandboxes.find(current_target().sandbox_id, token, or_traffic=or_traffic)).contexts

    async def _known(self, request: Request) -> Contexts:
        contexts = await self._of(request, or_traffic=True)  # SDKs send no other token with these requests
        await contexts.learned()
        return contexts

    async def execute(self, request: Request) -> Response:
        contexts = await self._of(request)
        call = await json_of(request, _Code, BODY_BYTES_MAX)
        code = call.python()
        if call.context_id:
            await contexts.learned()
            contexts.find(call.context_id)
        if contexts.waiting >= WAITING_MAX:
            raise Refusal(429, f"{WAITING_MAX} executions of this sandbox run or wait: repeat this one later")
        return _Execution(contexts, call, code)

    async def list_contexts(self, request: Request) -> Response:
        return JSONResponse((await self._known(request)).listed())

    async def create_context(self, request: Request) -> Response:
        contexts = await self._known(request)
        new = await json_of(request, _NewContext, BODY_BYTES_MAX)
        _language(new.language, _PYTHON)
        return JSONResponse((await contexts.create(new.cwd or HOME)).described())

    async def remove_context(self, request: Request) -> Response:
        contexts = await self._known(request)
        await contexts.remove(contexts.find(request.path_params["context_id"]))
        return Response(status_code=204)

    async def restart_context(self, request: Request) -> Response:
        contexts = await self._known(request)
        await contexts.restart(contexts.find(request.path_params["context_id"]))
        return Response(status_code=204)


class _Execution(Response):
    """The answer to a request to run code: runs it, and sends its lines as they come."""

    media_type = "application/x-ndjson"

    def __init__(self, contexts: Contexts, call: _Code, code: str) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._contexts, self._session = contexts, contexts.session
        self._call, self._code = call, code
        self._lines: list[results.Line] = []
        self._sending = asyncio.Lock()
        self._begun = False
        self._sent_time = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_message = send
        self._contexts.waiting += 1
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            is_gone = await self._ended()
            await self._send(*([] if is_gone else [{"type": "end_of_execution"}]), more=is_gone)
        finally:  # after the last line, so that no line is cut off
            self._contexts.waiting -= 1
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)
        if is_gone:
            raise StreamCut

    async def _ended(self) -> bool:
        """Runs the code, and leaves lines about its end. Returns True if the sandbox is gone."""
        try:
            async with self._contexts.lock:
                await self._run()
        except (Refusal, ExecutorClientError) as error:
            name = "SandboxError" if isinstance(error, Refusal) else type(error).__name__
            refusal = refusal_of(error)
            self._lines.append(results.failure(name, refusal.message, refusal.message))
            return refusal.status == GONE
        except Exception:  # noqa: BLE001 - the border: a stream that breaks means that the sandbox is gone
            _log.exception("execution_failed", session_id=self._session.session_id)
            self._lines.append(results.failure("InternalError", "the gateway failed; its log has the reason"))
        return False

    async def _run(self) -> None:
        """Runs the code in its turn. The lines about its end wait to be sent together."""
        contexts, session = self._contexts, self._session
        await contexts.learn()
        context = contexts.find(self._call.context_id or DEFAULT)
        context.executions += 1
        # Sent together with the next line.
        self._lines.append({"type": "number_of_executions", "execution_count": context.executions})
        await contexts.enter(context)
        code = await pip.resolved(session, self._code)
        await contexts.restore_env()
        if self._call.env:
            await contexts.set_env(self._call.env)
        contexts.running = context.context_id
        try:
            result = await session.execute(code, on_event=self._report)
        finally:
            contexts.running = None
        if not result.succeeded:
            self._lines.append(await self._failure(result, code))
        elif result.output is not None:
            make = results.line_of_value
            small = results.is_small(result.output)
            self._lines.append(make(result.output) if small else await asyncio.to_thread(make, result.output))
        await contexts.restore_env()

    async def _failure(self, result: ExecutionResult, code: str) -> results.Line:
        """Raises Refusal or SessionGone if the sandbox is gone."""
        session = self._session
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

    async def _report(self, event: ExecutionEvent) -> None:
        line = results.line_of(event)
        if line is not None:
            await self._send(line)

    async def _keep_alive(self) -> None:
        while True:
            silence_s = time.monotonic() - self._sent_time
            if silence_s < KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S - silence_s)
            else:
                await self._send({"type": "keepalive"})

    async def _send(self, *lines: results.Line, more: bool = True) -> None:
        """Sends the waiting lines, then these."""
        async with self._sending:
            waiting = [*self._lines, *lines]
            self._lines.clear()  # not a new list: an `append` may be bound to this one since before an `await`
            if not self._begun:
                self._begun = True
                await self._send_message({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            body = b"".join(map(results.encoded, waiting))
            await self._send_message({"type": "http.response.body", "body": body, "more_body": more})
            self._sent_time = time.monotonic()


async def _health(_: Request) -> Response:
    return PlainTextResponse("OK")


def _language(name: str | None, offered: Collection[str]) -> str:
    """Returns a name of `offered`; Python's by default. Raises Refusal (501) for another."""
    language = (name or "python").strip().lower()
    if language not in offered:
        why = "the interpreter runs python, and bash in steps of their own"
        raise not_offered(f"the language {language[:32]!r}", why)
    return language
