"""A Jupyter kernel for images without ipykernel: it runs here, and forwards cells to the interpreter of a session.

    python -m executor_client.integrations.jupyter_kernel -f CONNECTION_FILE

`executor jupyter install --forwarding` writes the kernelspec. A cell is an execution: imports, limits, audit and the
journal apply, and it survives a restart of the daemon. If the session is lost or the daemon can't be reached, this
process ends, so Jupyter reports a dead kernel; it never shows that as output.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
from typing import Any, ClassVar, NoReturn

from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from IPython.core.formatters import DisplayFormatter
from IPython.core.inputtransformer2 import TransformerManager
from IPython.utils.tokenutil import token_at_cursor
from traitlets import Dict

from executor_client import (
    AsyncSession,
    DisplayEvent,
    ErrorDetail,
    ExecutionResult,
    ImageEvent,
    LogEvent,
    Outcome,
    OutputCutEvent,
    VariablesState,
    __version__,
)
from executor_client._core.completion import listing, names_of
from executor_client._core.requests import freely_allowed
from executor_client._core.value_text import value_text
from executor_client.errors import ExecutorClientError, InvalidRequest, PolicyViolationError
from executor_client.events import ExecutionEvent
from executor_client.integrations._common import SessionOptions, attached_session, client

_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*\Z")
_LOOK_TIMEOUT_S = 2.0
_VALUE_CHARS = 100_000


class RemoteKernel(Kernel):
    """Forwards to a session, which ends with this process or with a shutdown."""

    implementation = "remote-executor"
    implementation_version = __version__
    banner = "Python in a sandbox"
    language_info: ClassVar[dict[str, Any]] = {"name": "python", "mimetype": "text/x-python", "file_extension": ".py"}
    options = Dict(help="The fields of SessionOptions: image, limits, idle_time_s, network, ...").tag(config=True)

    _session: AsyncSession | None = None
    _loop: asyncio.AbstractEventLoop | None = None

    async def do_execute(self, code: str, silent: bool, *_: Any, **__: Any) -> dict[str, Any]:
        if self._session is None:
            self._session = await self._create()
        send = _drop if silent else self._send
        try:
            result = await self._session.execute(code, on_event=lambda event: send(*_message(event)))
        except (InvalidRequest, PolicyViolationError) as error:
            failure = {"ename": type(error).__name__, "evalue": str(error), "traceback": [str(error)]}
        except ExecutorClientError as error:
            self._die(error)
        else:
            if result.state is VariablesState.LOST:  # also for a session that was ended meanwhile
                self._die(result.error.message if result.error else "the sandbox is lost")
            failure = {} if result.succeeded else _failure(result)
            if result.succeeded and result.output is not None:
                data, metadata = DisplayFormatter().format(result.output, exclude={"text/plain"})
                data["text/plain"] = value_text(result.output, _VALUE_CHARS)
                send("execute_result", {"data": data, "metadata": metadata, "execution_count": self.execution_count})
        if not failure:
            return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}
        send("error", failure)
        return {"status": "error", "execution_count": self.execution_count, **failure}

    async def _create(self) -> AsyncSession:
        """Creates the session, with all imports that the policy allows without an approval."""
        try:
            options = SessionOptions(**self.options)
            session = await attached_session(options, framework="jupyter")
            if allowed := freely_allowed(await client(options).get_policy()):
                await session.authorize_imports(allowed)
        except ExecutorClientError as error:
            self._die(error)
        self._loop = asyncio.get_running_loop()
        return session

    def _die(self, reason: object) -> NoReturn:
        self.log.critical("the kernel ends: %s", reason)
        os._exit(1)

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        if kind:
            self.send_response(self.iopub_socket, kind, content)

    async def _look(self, expression: str) -> Any:
        """Evaluates an expression of dotted names, which calls nothing; None if that is not possible now."""
        if self._session is None:
            return None
        try:
            return await self._session.evaluate(expression, timeout_s=_LOOK_TIMEOUT_S)
        except ExecutorClientError:
            return None

    async def do_complete(self, code: str, cursor_pos: int) -> dict[str, Any]:
        found = listing(code[:cursor_pos])
        expression, typed = found or ("", "")
        names = names_of(await self._look(expression)) if found else set()
        matches = sorted(each for each in names if each.startswith(typed))
        ends = {"cursor_start": cursor_pos - len(typed), "cursor_end": cursor_pos}
        return {"status": "ok", "matches": matches, **ends, "metadata": {}}

    async def do_inspect(self, code: str, cursor_pos: int, *_: Any, **__: Any) -> dict[str, Any]:
        name = token_at_cursor(code, cursor_pos)
        expression = f"(repr(type({name})), getattr({name}, '__doc__', None))"
        looked = await self._look(expression) if _NAME.match(name) else None
        data = {"text/plain": "\n\n".join(map(str, filter(None, looked)))} if isinstance(looked, tuple) else {}
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    async def do_is_complete(self, code: str) -> dict[str, Any]:
        status, indent = TransformerManager().check_complete(code)
        return {"status": status, "indent": " " * (indent or 0)}

    # The control channel has a thread of its own.

    async def interrupt_request(self, stream: Any, ident: Any, parent: Any) -> None:
        if self._session is not None and self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._session.cancel(), self._loop)
        self.session.send(stream, "interrupt_reply", {"status": "ok"}, parent, ident=ident)

    async def do_shutdown(self, restart: bool) -> dict[str, Any]:
        if self._session is not None and self._loop is not None:
            try:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._session.close(), self._loop))
            except ExecutorClientError as error:
                self.log.warning("the session ends later, without its client: %s", error)
        return {"status": "ok", "restart": restart}


def _drop(kind: str, content: dict[str, Any]) -> None:
    """For silent cells."""


def _message(event: ExecutionEvent) -> tuple[str, dict[str, Any]]:
    """Returns the type and content of Jupyter's message for an event; an empty type for none."""
    if isinstance(event, LogEvent):
        return "stream", {"name": event.stream, "text": event.text}
    if isinstance(event, OutputCutEvent):
        return "stream", {"name": "stderr", "text": f"\n[{event.omitted_bytes} bytes of output omitted]\n"}
    if isinstance(event, ImageEvent):
        data = {event.image.mime_type: base64.b64encode(event.image.data).decode()}
        return "display_data", {"data": data, "metadata": {}}
    if isinstance(event, DisplayEvent):
        return "display_data", {"data": dict(event.display.data), "metadata": {}}
    return "", {}


def _failure(result: ExecutionResult) -> dict[str, Any]:
    error = result.error or ErrorDetail(type=result.outcome.name, message="")
    name = "KeyboardInterrupt" if result.outcome is Outcome.CANCELLED else error.type or result.outcome.name
    lines = error.traceback.splitlines() or [f"{name}: {error.message}"]
    if result.state is not VariablesState.KEPT:
        lines.append("The interpreter was restarted; its variables are gone.")
    return {"ename": name, "evalue": error.message, "traceback": lines}


if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=RemoteKernel)
