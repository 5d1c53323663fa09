"""`RemoteExecutor`: smolagents' executor interface on a session of the daemon.

It is always truthy (smolagents replaces a falsy executor by its local one), connects on first use, can serve several
agents in turn, keeps the prints of failed code (`state["_print_outputs"]`), and never runs code in this process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import PIL.Image
from rich.text import Text
from smolagents.local_python_executor import PythonExecutor
from smolagents.monitoring import LogLevel

from executor_client import (
    AuthenticationError,
    AuthorizationError,
    ExecutionEvent,
    ExecutionResult,
    ExecutorClient,
    ExecutorClientError,
    FileInfo,
    InvalidRequest,
    Limits,
    LimitWarningEvent,
    LogEvent,
    OnApproval,
    Outcome,
    PolicyViolationError,
    Recorder,
    ReentrantExecution,
    ResourceExhaustedError,
    Rollback,
    Session,
    SessionFiles,
    TlsConfig,
    UnavailableError,
    Wait,
)
from executor_client._core.arguments import checks_calls
from executor_client._core.convert import limits_to_wire, named_limits
from executor_client._core.local import LocalPath
from executor_client._core.requests import environment, state_of
from executor_client._core.short_repr import ShortRepr
from executor_client._core.status import is_transport_failure
from executor_client.smolagents.code_output import RemoteCodeOutput, writable
from executor_client.smolagents.connecting import connect
from executor_client.smolagents.console import LogStream, WaitLog, escape
from executor_client.smolagents.failures import (
    CodeExecutionError,
    DaemonLost,
    Restored,
    code_failure,
    describe,
    describe_lost_session,
    describe_restart,
)
from executor_client.smolagents.files import AnswerFiles, Files, start_files
from executor_client.smolagents.host_tools import placed_tools
from executor_client.smolagents.lease import SessionLease, SessionReplaced, weakly
from executor_client.smolagents.page import PAGE_EXPRESSION, Page, read_page
from executor_client.smolagents.sandbox_tools import Placement, checked
from executor_client.smolagents.session_request import SessionRequest, check_access
from executor_client.smolagents.state import BOOKKEEPING, PRINT_OUTPUTS, SessionState
from executor_client.smolagents.step_logs import Shown, step_logs
from executor_client.smolagents.undo import StepUndo
from executor_client.smolagents.unwrapping import unwrapped

_log = logging.getLogger(__name__)

MAX_PRINT_OUTPUTS_LENGTH = 50_000
"""Characters of logs that an observation holds; smolagents' own default for its local executor."""

_REFUSALS = (PolicyViolationError, AuthorizationError, AuthenticationError, ResourceExhaustedError)


@checks_calls
class RemoteExecutor(ShortRepr, PythonExecutor):  # type: ignore[misc]  # smolagents is untyped
    """Runs an agent's code in a sandbox of the daemon.

    smolagents passes the first two parameters to the executors it creates. `address` and `token` default to the local
    daemon's; `image`, `backend` and `limits` to the policy's. `network` names hosts that the code may reach in addition
    to the policy's default hosts. `logger`, an agent's logger, shows prints and waits live. A given `client` is used
    instead of a new one, and is not closed.

    `packages` are requirements, such as "scikit-learn>=1.5", in addition to the packages of the image; their modules
    must also be authorized. If the policy adds packages automatically (`packages.auto`), authorized imports and the
    modules of tools in the sandbox are enough. Otherwise an authorized module that the sandbox lacks is refused on
    first use, with the images known to have it.

    `env` has environment variables of each session; they are not saved with an agent. `labels` are the session's
    labels, `node_labels` the labels that its node in a fleet must have. Each session starts with `state`, a result of
    `Session.export_state`, and with `files` in its workspace: local paths, or a mapping from workspace paths to local
    paths or bytes. `session`, a `Session` or an id, is used instead of a new session: it is never ended or replaced,
    and arguments for a new session can't be combined with it. If `session` is a name, the session of this name is used,
    or created with those arguments; it is not ended either.

    `tool_placement` is "host" (tools run in this process), "sandbox" (tools run in the sandbox if they can), or a
    mapping from tool names to these, with "*" for all other names (default "host").

    `additional_functions` are offered to the code as further tools. If a final answer is a path of the workspace, its
    file is saved in `download_dir`; default: a directory that is removed when this process ends.

    With `savepoints="each-step"`, a savepoint is taken before each step: `undo` goes back by steps, and a step that
    crashed, ran out of memory or was killed leaves variables and files unchanged.

    `prelude` is code that runs first in each interpreter of each session, under the same rules as the agent's code,
    including authorized imports. The agent's code can use its names.

    `record` is a path, such as "run.rxr": `cleanup` writes a recording of all sessions there, with the calls of the
    model if the agent is our `CodeAgent` (see `Session.record`). A `Recorder` can be given instead, and is not closed.

    `on_approval` decides requests that the policy leaves to a person, like that of `ExecutorClient`. By default, this
    process asks at its terminal, if it has one and the client may decide.

    Raises `InvalidRequest` for unknown limits. A request beyond the policy is refused on first use, before the first
    call of the model; `PolicyViolationError` then lists every violation.

    A call raises `CodeExecutionError` if the code failed, `DaemonLost` (not an `Exception`) if the daemon failed.
    """

    _shows = ("_address", "_request.image", "_lease.current")

    def __init__(
        self,
        additional_authorized_imports: Sequence[str] = (),
        logger: Any = None,
        *,
        address: str | None = None,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        image: str | None = None,
        backend: str | None = None,
        network: Sequence[str] = (),
        packages: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        limits: Mapping[str, Any] | Limits | None = None,
        labels: Mapping[str, str] | None = None,
        node_labels: Mapping[str, str] | None = None,
        prelude: str = "",
        state: bytes | None = None,
        files: Files = None,
        session: Session | str | None = None,
        tool_placement: Placement = "host",
        additional_functions: Mapping[str, Callable[..., Any]] | None = None,
        download_dir: LocalPath | None = None,
        savepoints: str | None = None,
        max_print_outputs_length: int | None = None,
        client: ExecutorClient | None = None,
        record: LocalPath | Recorder | None = None,
        on_approval: OnApproval | None = None,
    ) -> None:
        check_access(client, session, (address, token, tls, on_approval))
        limits_to_wire(limits)  # raises here, not at first use: the traceback then shows the caller's line
        request = SessionRequest(
            image=image,
            authorized_imports=tuple(additional_authorized_imports),
            limits=named_limits(limits),
            prelude=prelude,
            backend=backend,
            network=tuple(network),
            packages=tuple(packages),
            env=environment(env),
            labels=dict(labels or {}),
            node_labels=dict(node_labels or {}),
            state=state_of(state),
            files=start_files(files),
        )
        self.additional_authorized_imports = list(additional_authorized_imports)
        self.logger = logger
        self.max_print_outputs_length = max_print_outputs_length or MAX_PRINT_OUTPUTS_LENGTH
        self._print_outputs: dict[str, Any] = {PRINT_OUTPUTS: ""}
        self.last_images: list[PIL.Image.Image] = []
        self.last_artifacts: list[FileInfo] = []
        self._address, self._tls = address, tls
        self._request = request
        self._tool_placement = checked(tool_placement)
        self._functions, self._has_tools = dict(additional_functions or {}), False
        self._wait_log, self._notice = WaitLog(), ""
        self._interrupted = False  # the next step is refused
        self.record = record
        self._lease = SessionLease(
            (lambda: client) if client is not None else self._connector(address, token, tls, on_approval),
            owns_client=client is None,
            request=request,
            existing=session,
            record=record,
        )
        self._undo = StepUndo(self._lease, savepoints)
        self._answers = AnswerFiles(download_dir, weakly(self._current_session), weakly(self._notify))

    @property
    def state(self) -> SessionState:
        """The session's variables, read from and written to the sandbox on each access: `executor.state["x"]`."""
        # Created on each access: a stored one would be a reference cycle that keeps the executor alive.
        return SessionState(self._lease.variables, self.send_variables, self._print_outputs)

    def send_variables(self, variables: Mapping[str, Any]) -> None:
        """Sets the variables of the task, in this interpreter and in each replacement."""
        self._interrupted = False  # an agent sends them at the start of a run
        sent = {name: unwrapped(value) for name, value in variables.items() if name not in BOOKKEEPING}
        for name in sent:
            if not str(name).isidentifier():
                raise ValueError(f"the state variable {name!r} can't be used in code: its name is not an identifier")
        if sent:
            self._note_replacement(lambda: self._lease.set_variables(sent))

    def send_tools(self, tools: Mapping[str, Callable[..., Any]]) -> None:
        """Offers tools and managed agents to the code. They run at their `tool_placement` and are not changed.

        Raises `ToolNotShippable` for a tool that is placed in the sandbox but can't run there.
        """
        # An additional function overrides a tool of the same name, as in the local executor.
        placed = placed_tools({**tools, **self._functions}, self._tool_placement, self._answers.fetch)
        self._note_replacement(lambda: self._lease.register_tools(placed))
        self._has_tools = True

    def __call__(self, code_action: str) -> RemoteCodeOutput:
        self._print_outputs[PRINT_OUTPUTS] = ""
        self.last_images = []
        self.last_artifacts = []
        shown = Shown()
        if self._interrupted:
            self._interrupted = False
            raise CodeExecutionError("Code execution was interrupted before it began.", Outcome.CANCELLED)
        try:
            if self._functions and not self._has_tools:
                self.send_tools({})
            if self._lease.restore():
                self._note(describe_restart(self._restored))
            result = self._lease.execute(code_action, lambda session: self._run(session, code_action, shown))
            self._note(self._undo.undo_if_asked())
        except SessionReplaced as gone:
            lost_session = describe_lost_session(gone.reason, self._restored)
            raise CodeExecutionError(f"Code execution failed. {lost_session}", Outcome.LOST) from gone
        except ReentrantExecution:
            # A tool used the executor that waits for it. This is the tool's error, not the run's.
            raise
        except InvalidRequest as error:
            raise CodeExecutionError(f"Code execution failed: {error.message}") from error
        except ExecutorClientError as error:
            if is_transport_failure(error):
                self._lease.abandon()
            what = "refuses to go on" if isinstance(error, _REFUSALS) else "failed"
            raise DaemonLost(f"the execution service {what}: {error}") from error
        self._interrupted = False  # an interrupt has ended this step by now
        logs = self._keep(result, shown)
        if not result.succeeded and not result.is_final_answer:
            text = describe(result, code_action, self._lease.limits, self._restored)
            raise code_failure(text, result.outcome)
        return RemoteCodeOutput(output=writable(result.output), logs=logs, is_final_answer=result.is_final_answer)

    def interrupt(self) -> None:
        """Cancels the running step, or refuses the next one of this run. Thread-safe. Variables are kept."""
        self._interrupted = True
        session = self._lease.current
        try:
            if session is not None:
                session.cancel()
        except ExecutorClientError as error:
            _log.warning("the step could not be cancelled: %s", error)

    @property
    def session(self) -> Session:
        """The session of the code. Creates one if needed; if it is lost, another replaces it."""
        return self._lease.session()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder of the sessions, if they are recorded."""
        return self._lease.recorder()

    @property
    def files(self) -> SessionFiles:
        """The files of the session's workspace. Creates the session if needed.

        A replacement session has its own workspace, with only the files of the argument `files`.
        """
        return self._lease.session().files

    def evaluate(self, expression: str, *, timeout_s: float | None = None) -> Any:
        """Returns the value of an expression between two steps, for step callbacks; see `Session.evaluate`.

        Creates no session, and keeps the tools, and the logs and images of the last step. Raises EvaluationError if
        there is no value: the expression failed, the agent's code has not run yet or is running, the session or the
        daemon is gone. Raises InvalidRequest if `expression` is not an expression.
        """
        return self._lease.evaluate(expression, timeout_s)

    def undo(self, steps: int = 1) -> Rollback:
        """Undoes the last steps: restores variables, modules and files of the workspace.

        Only with `savepoints="each-step"`, as far back as the session has savepoints. The prints and images of the last
        step are dropped. Effects of tools outside the sandbox stay. `Rollback.undone` names the steps.

        Raises InvalidRequest if there are fewer steps, or if no savepoint was taken before the first of them, for
        example because the program had threads; then nothing is undone. Raises the errors of `Session.rollback`.
        """
        done = self._undo.undo(steps)
        self._print_outputs[PRINT_OUTPUTS], self.last_images, self.last_artifacts = "", [], []
        return done

    def ask_undo(self, steps: int = 1) -> tuple[str, ...]:
        """For tools: undoes the steps before the current one when it has ended. Returns their first lines.

        Raises InvalidRequest as `undo` does.
        """
        return self._undo.ask(steps)

    def page(self, *, timeout_s: float | None = None) -> Page | None:
        """Returns the current page of helium's browser in the session; None before the first page.

        Raises EvaluationError as `evaluate` does.
        """
        return read_page(self.evaluate(PAGE_EXPRESSION, timeout_s=timeout_s))

    def screenshot(self, *, timeout_s: float | None = None) -> PIL.Image.Image | None:
        """Returns the screenshot of `page()`."""
        page = self.page(timeout_s=timeout_s)
        return None if page is None else page.image

    def cleanup(self) -> None:
        """Ends the session, unless the caller owns it. Idempotent; the next use starts a new one."""
        self._has_tools = False
        try:
            self._lease.close()
        except UnavailableError as error:
            # The run has its answer, and the daemon ends idle sessions when it is back.
            _log.warning("the session could not be ended: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cleanup()

    def saved_kwargs(self) -> dict[str, Any]:
        """Returns the arguments to recreate this executor for a saved agent, as JSON values. Never secrets.

        Omits what belongs to this process or machine: files, state, session, functions, the directory for answers.
        """
        saved: dict[str, Any] = {}
        if self._address is not None:
            saved["address"] = self._address
        if self._tls is True:  # a TlsConfig names files of this machine
            saved["tls"] = True
        saved.update(self._request.saved())
        if self._undo.mode is not None:
            saved["savepoints"] = self._undo.mode
        if self._tool_placement != "host":
            saved["tool_placement"] = self._tool_placement
        if self.max_print_outputs_length != MAX_PRINT_OUTPUTS_LENGTH:
            saved["max_print_outputs_length"] = self.max_print_outputs_length
        return saved

    # Helpers, in order of use

    def _connector(
        self, address: str | None, token: str | None, tls: TlsConfig | bool | None, on_approval: OnApproval | None
    ) -> Callable[[], ExecutorClient]:
        on_wait = weakly(self._show_wait)
        return lambda: connect(address, token, tls, on_wait, on_approval)

    def _show_wait(self, wait: Wait) -> None:
        self._wait_log.show(self.logger, wait)

    def _current_session(self) -> Session | None:
        return self._lease.current

    @property
    def _restored(self) -> Restored:
        given = {"the state that the executor was given": self._request.state, "its files": self._request.files}
        return Restored(
            self._lease.variable_names,
            prelude=bool(self._request.prelude),
            beginnings=[words for words, value in given.items() if value],
            replaced=self._lease.owns_session,
        )

    def _note_replacement(self, send: Callable[[], None]) -> None:
        """Sends something to the session. If the session had ended, the next observation says so."""
        try:
            send()
        except SessionReplaced as gone:
            self._note(describe_lost_session(gone.reason, self._restored))

    def _note(self, text: str) -> None:
        """Adds a line at the start of the next observation, unless it is empty."""
        if text:
            self._notice = "\n".join(part for part in (self._notice, f"Note: {text}") if part)

    def _notify(self, text: str) -> None:
        """Shows a line to the person watching the run."""
        if self.logger is None:
            _log.info("%s", text)
        else:
            self.logger.log(Text(escape(text), style="dim italic"), level=LogLevel.INFO)

    def _run(self, session: Session, code: str, shown: Shown) -> ExecutionResult:
        stream = None if self.logger is None else LogStream(self.logger, self.max_print_outputs_length)

        def show(event: ExecutionEvent) -> None:
            if isinstance(event, LimitWarningEvent):
                self._warn(event)
            elif stream is not None and isinstance(event, LogEvent):
                stream.feed(event.text, event.stream)

        try:
            saves = self._undo.mode is not None
            result = session.execute(code, on_event=show, output_mode="last_statement", savepoint=saves)
        except BaseException as error:
            if isinstance(error, UnavailableError) or not isinstance(error, ExecutorClientError):  # it may have run
                self._undo.note(session, code, None)
            raise
        else:
            self._undo.note(session, code, result)
            return result
        finally:
            if stream is not None:
                stream.close()
                shown.whole = stream.showed_all

    def _warn(self, event: LimitWarningEvent) -> None:
        """Shows the person watching the run that a limit is nearly used up, once for each limit of a session.

        The model is only warned about limits of the session, which later steps share: an execution's own limit appears
        in its result.
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

    def _keep(self, result: ExecutionResult, shown: Shown) -> str:
        """Keeps the images, files and logs of an execution; returns the logs for the observation."""
        self.last_images = result.images
        self.last_artifacts = list(result.artifacts)
        notice, self._notice = self._notice, ""
        logs = step_logs(notice, result, shown, self.max_print_outputs_length)
        self._print_outputs[PRINT_OUTPUTS] = logs
        return logs
