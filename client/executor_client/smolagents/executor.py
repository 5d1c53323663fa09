"""`RemoteExecutor`: smolagents' executor interface on a session of the daemon.

Promises towards the agent: it is always truthy (smolagents replaces a falsy executor by its local one), connects at
first use, can be used by one agent after the other, keeps what was printed when code fails (`state["_print_outputs"]`),
and never runs code in this process.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import PIL.Image
from rich.text import Text
from smolagents.local_python_executor import CodeOutput, PythonExecutor
from smolagents.monitoring import LogLevel
from smolagents.utils import truncate_content

from executor_api.values import OpaqueValue, ValueLimits
from executor_client import (
    AuthenticationError,
    AuthorizationError,
    ExecutionEvent,
    ExecutionResult,
    ExecutorClient,
    ExecutorClientError,
    InvalidRequest,
    Limits,
    LimitWarningEvent,
    LogEvent,
    Outcome,
    PolicyViolationError,
    ReentrantExecution,
    ResourceExhaustedError,
    Session,
    TlsConfig,
    UnavailableError,
    Wait,
)
from executor_client._convert import limits_to_wire, named_limits
from executor_client._value_text import holds_values, text_chars, value_text
from executor_client.smolagents.console import LogStream, show_wait
from executor_client.smolagents.failures import (
    CodeExecutionError,
    DaemonLost,
    InPlaceAgain,
    describe,
    describe_lost_session,
    describe_restart,
)
from executor_client.smolagents.host_tools import placed_tools
from executor_client.smolagents.images import logs_with_images
from executor_client.smolagents.lease import SessionGone, SessionLease, SessionRequest
from executor_client.smolagents.page import PAGE_EXPRESSION, Page, read_page
from executor_client.smolagents.sandbox_tools import Placement, checked
from executor_client.smolagents.unwrapping import unwrapped

_log = logging.getLogger(__name__)

MAX_PRINT_OUTPUTS_LENGTH = 50_000
"""Characters of logs that an observation holds; smolagents' own default for its local executor."""

WRITTEN_CHARS_MAX = 1 << 30
"""Of a step's value as text, before smolagents cuts it. Values that share nothing have less."""

_NOBODY_THERE = ("", "DRAINING")
_REFUSALS = (PolicyViolationError, AuthorizationError, AuthenticationError, ResourceExhaustedError)

# What smolagents' local executor keeps for itself in the state that it shares with the agent: no variables of the task.
_BOOKKEEPING = frozenset({"_print_outputs", "_operations_count", "__name__"})


@dataclasses.dataclass
class RemoteCodeOutput(CodeOutput):  # type: ignore[misc]  # smolagents is untyped
    """smolagents' `CodeOutput`, which can also be unpacked as (output, logs, is_final_answer)."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.logs, self.is_final_answer))


class RemoteExecutor(PythonExecutor):  # type: ignore[misc]  # smolagents is untyped
    """Runs an agent's code in a sandbox of the daemon.

    The first two parameters are what smolagents hands to an executor it makes itself. `address` and `token` default to
    the local daemon's own; `image` and `limits` to the policy's. `logger`, an agent's, shows prints as they come, and
    what is waited for. A `client` that is passed in is used instead of a new one, and is not closed.

    `tool_placement` is "host", where tools run in this process; "sandbox", for those that can run there; or a mapping
    of the names of tools to one of the two, with "*" for those that it does not name ("host" without that).

    `prelude` is code that runs before anything else in each interpreter of each session, under the same rules as the
    agent's code, authorized imports included. What it defines is there for the agent's code.

    Raises `InvalidRequest` for limits that there are not. What the policy does not grant is refused at first use, which
    is before the model is asked anything: `PolicyViolationError` then lists all of it.

    A call raises `CodeExecutionError` when the code failed, `DaemonLost` (no `Exception`) when the daemon did.
    """

    def __init__(
        self,
        additional_authorized_imports: Sequence[str] = (),
        logger: Any = None,
        *,
        address: str | None = None,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        image: str | None = None,
        limits: Mapping[str, Any] | Limits | None = None,
        prelude: str = "",
        tool_placement: Placement = "host",
        max_print_outputs_length: int | None = None,
        client: ExecutorClient | None = None,
    ) -> None:
        if client is not None and (address, token, tls) != (None, None, None):
            raise ValueError("address, token and tls belong to the client: pass either them or client")
        limits_to_wire(limits)  # raises for what no daemon could make sense of, while the caller's line is at hand
        self.additional_authorized_imports = list(additional_authorized_imports)
        self.logger = logger
        self.max_print_outputs_length = max_print_outputs_length or MAX_PRINT_OUTPUTS_LENGTH
        self.state: dict[str, Any] = {"_print_outputs": ""}
        self.last_images: list[PIL.Image.Image] = []
        self._address = address
        self._tls = tls
        self._image = image
        self._limits = named_limits(limits)
        self._prelude = prelude
        self._tool_placement = checked(tool_placement)
        self._notice = ""
        self._lease = SessionLease(
            (lambda: client) if client is not None else self._connector(address, token, tls),
            owns_client=client is None,
            request=SessionRequest(image, tuple(additional_authorized_imports), self._limits, prelude),
        )

    def send_variables(self, variables: Mapping[str, Any]) -> None:
        """Sets the variables of the task, in the interpreter and in each that replaces it."""
        sent = {name: unwrapped(value) for name, value in variables.items() if name not in _BOOKKEEPING}
        for name in sent:
            if not str(name).isidentifier():
                raise ValueError(f"the state variable {name!r} cannot be used in code: its name is no identifier")
        if sent:
            self._noting(lambda: self._lease.set_variables(sent))

    def send_tools(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Offers tools and managed agents to the code. They run where `tool_placement` says and are not changed.

        Raises `ToolNotShippable` for a tool that was to run in the sandbox and can't.
        """
        made = placed_tools(tools, self._tool_placement)
        self._noting(lambda: self._lease.register_tools(made))

    def __call__(self, code_action: str) -> RemoteCodeOutput:
        self.state["_print_outputs"] = ""
        self.last_images = []
        try:
            if self._lease.restore():
                self._note(describe_restart(self._in_place_again))
            result = self._lease.execute(code_action, lambda session: self._run(session, code_action))
        except SessionGone as gone:
            lost_session = describe_lost_session(gone.reason, self._in_place_again)
            raise CodeExecutionError(f"Code execution failed. {lost_session}", Outcome.LOST) from gone
        except ReentrantExecution:
            # A tool's own mistake, for which neither the daemon nor the run that waits for the tool is to end.
            raise
        except InvalidRequest as error:
            raise CodeExecutionError(f"Code execution failed: {error.message}") from error
        except ExecutorClientError as error:
            if isinstance(error, UnavailableError) and error.reason in _NOBODY_THERE:
                self._lease.abandon()
            what = "refuses to go on" if isinstance(error, _REFUSALS) else "failed"
            raise DaemonLost(f"the execution service {what}: {error}") from error
        logs = self._keep(result)
        if not result.succeeded and not result.is_final_answer:
            text = describe(result, code_action, self._lease.limits, self._in_place_again)
            raise CodeExecutionError(text, result.outcome)
        return RemoteCodeOutput(output=_writable(result.output), logs=logs, is_final_answer=result.is_final_answer)

    def evaluate(self, expression: str, *, timeout_s: float | None = None) -> Any:
        """The value of an expression, between two steps: for step callbacks; see `Session.evaluate`.

        Neither the logs and images of the last step nor the tools are touched, and no session is begun for it. Raises
        EvaluationError when there is no value, whatever the reason: the expression failed, the agent's code has not run
        yet, or runs just now, the session or the daemon is gone. Raises InvalidRequest for what is no expression.
        """
        return self._lease.evaluate(expression, timeout_s)

    def page(self, *, timeout_s: float | None = None) -> Page | None:
        """What the browser that helium drives in the session shows; None when it has opened no page yet.

        Raises EvaluationError as `evaluate` does.
        """
        return read_page(self.evaluate(PAGE_EXPRESSION, timeout_s=timeout_s))

    def screenshot(self, *, timeout_s: float | None = None) -> PIL.Image.Image | None:
        """The picture of `page()`."""
        page = self.page(timeout_s=timeout_s)
        return None if page is None else page.image

    def cleanup(self) -> None:
        """Ends the session. Idempotent; an executor that is used again starts a new one."""
        try:
            self._lease.close()
        except UnavailableError as error:
            # The run is over and its answer is there; the daemon, when it comes back, ends idle sessions by itself.
            _log.warning("the session could not be ended: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def saved_kwargs(self) -> dict[str, Any]:
        """The arguments that a saved agent needs to get such an executor again, as JSON. Never secrets."""
        saved: dict[str, Any] = {}
        if self._address is not None:
            saved["address"] = self._address
        if self._tls is True:  # a TlsConfig names files of this machine
            saved["tls"] = True
        if self._image is not None:
            saved["image"] = self._image
        if self._limits:
            saved["limits"] = dict(self._limits)
        if self._prelude:
            saved["prelude"] = self._prelude
        if self._tool_placement != "host":
            saved["tool_placement"] = self._tool_placement
        if self.max_print_outputs_length != MAX_PRINT_OUTPUTS_LENGTH:
            saved["max_print_outputs_length"] = self.max_print_outputs_length
        return saved

    # Helpers, in order of use

    def _connector(
        self, address: str | None, token: str | None, tls: TlsConfig | bool | None
    ) -> Callable[[], ExecutorClient]:
        ours = weakref.ref(self)  # the client must not keep the executor, whose end is the client's

        def on_wait(wait: Wait) -> None:
            executor = ours()
            if executor is not None:
                show_wait(executor.logger, wait)

        return lambda: ExecutorClient(address, token=token, tls=tls, on_wait=on_wait)

    @property
    def _in_place_again(self) -> InPlaceAgain:
        return InPlaceAgain(self._lease.variable_names, prelude=bool(self._prelude))

    def _noting(self, send: Callable[[], None]) -> None:
        """Between two runs a session may have come to its end: the next observation says so, and the run goes on."""
        try:
            send()
        except SessionGone as gone:
            self._note(describe_lost_session(gone.reason, self._in_place_again))

    def _note(self, text: str) -> None:
        """The next observation says it first."""
        self._notice = "\n".join(part for part in (self._notice, f"Note: {text}") if part)

    def _run(self, session: Session, code: str) -> ExecutionResult:
        stream = None if self.logger is None else LogStream(self.logger, self.max_print_outputs_length)

        def show(event: ExecutionEvent) -> None:
            if isinstance(event, LimitWarningEvent):
                self._warn(event)
            elif stream is not None and isinstance(event, LogEvent):
                stream.feed(event.text, event.stream)

        try:
            return session.execute(code, on_event=show, output_mode="last_statement")
        finally:
            if stream is not None:
                stream.close()

    def _warn(self, event: LimitWarningEvent) -> None:
        """Tells whoever watches the run, once for each limit of a session, that its end is near.

        And the model, when all steps to come have to do with what is left; of one step, it learns how it ended.
        """
        if not self._lease.note_warning(event.limit):
            return
        text = f"{event.used:,} of the {event.budget:,} {event.limit} that the policy allows are used up"
        if event.limit.startswith("session_"):
            self._note(text)
        if self.logger is None:
            _log.warning("%s", text)
        else:
            self.logger.log(Text(f"Warning: {text}", style="bold yellow"), level=LogLevel.INFO)

    def _keep(self, result: ExecutionResult) -> str:
        """Takes over what the execution showed; returns the logs as the observation holds them."""
        self.last_images = result.images
        notice, self._notice = self._notice, ""
        text = "\n".join(part for part in (notice, logs_with_images(result)) if part)
        logs: str = truncate_content(text, self.max_print_outputs_length)
        self.state["_print_outputs"] = logs
        return logs


def _writable(value: Any) -> Any:
    """The value, or what stands for it where its text would fill the memory.

    smolagents writes out the value of each step, and a hundred megabytes that a list holds a million times are quickly
    sent: the codec keeps what is shared. What holds no values is no longer than its bytes allow, and writing a table
    takes milliseconds, so that is left to smolagents.
    """
    if not holds_values(value) or text_chars(value) <= WRITTEN_CHARS_MAX:
        return value
    return OpaqueValue(type(value).__name__, value_text(value, ValueLimits().repr_chars))
