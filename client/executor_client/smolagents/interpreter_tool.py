"""`RemotePythonInterpreterTool`: smolagents' `PythonInterpreterTool`, with the code in a sandbox.

A `ToolCallingAgent` has no executor; its interpreter is a tool. The model sees the same name, inputs and form of result
as with smolagents' tool. The differences: code runs in a sandbox, variables are kept between calls, and the tool owns a
session, which the caller must end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, Self

import smolagents
from smolagents.utils import BASE_BUILTIN_MODULES, truncate_content

from executor_client import Limits
from executor_client._core.convert import named_limits
from executor_client.smolagents.executor import RemoteExecutor
from executor_client.smolagents.failures import CodeExecutionError

_WALL_TIME = "wall_time_s"

# The module of a saved tool. smolagents loads the first class in it.
_SAVED = """\
import executor_client.smolagents


class {name}(executor_client.smolagents.RemotePythonInterpreterTool):
    def __init__(self):
        super().__init__(authorized_imports={imports!r}, **{settings!r})
"""


class RemotePythonInterpreterTool(smolagents.Tool):  # type: ignore[misc]  # smolagents is untyped
    """A tool `python_interpreter` that runs code in a sandbox of the daemon.

    `authorized_imports` are added to the modules that smolagents always allows. `timeout_seconds` limits the wall time
    of one call; default: the policy's limit. All other arguments (`address`, `token`, `image`, `limits` and so on) are
    arguments of `RemoteExecutor`. Calls from several threads run one after another.

    A call raises `CodeExecutionError` if the code failed, which the agent reports to the model, and `DaemonLost` if the
    daemon failed, which ends the run. The session ends with `cleanup()`, with the `with` block, or after its idle time;
    the next call starts a new one.
    """

    name = "python_interpreter"
    description = (
        "This is a tool that evaluates python code in a sandbox. It can be used to perform calculations. "
        "Variables, functions and imports are kept from one call to the next."
    )
    inputs = {"code": {"type": "string", "description": "The python code to run in interpreter"}}  # noqa: RUF012
    output_type = "string"
    host_only_because = "it is a client of the daemon, and its code runs in a sandbox of its own"

    def __init__(
        self,
        *,
        authorized_imports: Iterable[str] | None = None,
        timeout_seconds: float | None = None,
        limits: Mapping[str, Any] | Limits | None = None,
        **executor_kwargs: Any,
    ) -> None:
        limits = named_limits(limits)
        if timeout_seconds is not None:
            if _WALL_TIME in limits:
                raise ValueError(f"timeout_seconds and limits[{_WALL_TIME!r}] are the same limit: pass one of them")
            limits[_WALL_TIME] = timeout_seconds
        additional = sorted(set(authorized_imports or ()) - set(BASE_BUILTIN_MODULES))
        self.authorized_imports = sorted({*BASE_BUILTIN_MODULES, *additional})
        self.inputs = {
            "code": {
                "type": "string",
                "description": (
                    "The code snippet to evaluate. Returns its output and the value of its last statement. "
                    f"It can only import the following python libraries: {self.authorized_imports}."
                ),
            }
        }
        self.executor = RemoteExecutor(additional, limits=limits or None, **executor_kwargs)
        self._one_at_a_time = threading.Lock()
        super().__init__()

    def forward(self, code: str) -> str:
        with self._one_at_a_time:
            try:
                output = self.executor(code)
            except CodeExecutionError as error:
                # smolagents only shows the error's text to the model.
                printed = self.executor.state["_print_outputs"]
                if not printed:
                    raise
                raise CodeExecutionError(f"{error}\nStdout before the failure:\n{printed}", error.outcome) from error
        # A CodeAgent cuts the value of a step, but a ToolCallingAgent does not.
        return f"Stdout:\n{output.logs}\nOutput: {truncate_content(str(output.output))}"

    def cleanup(self) -> None:
        """Ends the session, after a running call has returned. Idempotent."""
        with self._one_at_a_time:
            self.executor.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def to_dict(self) -> dict[str, Any]:
        """Returns the saved form, which loads as a sandboxed tool with the same settings and without a token."""
        code = _SAVED.format(
            name=type(self).__name__,
            imports=self.executor.additional_authorized_imports,
            settings=self.executor.saved_kwargs(),
        )
        return {"name": self.name, "code": code, "requirements": ["remote-executor[smolagents]", "smolagents"]}
