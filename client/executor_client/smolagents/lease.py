"""The session of one executor: created on first use, closed at the end, replaced if it is lost.

Each new session gets the prelude, the tools and the variables of the task; each new interpreter gets the variables. A
replacement is never silent: `SessionReplaced` gives the caller the reason, for the model. The caller's own session is
never replaced.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from smolagents.local_python_executor import InterpreterError

from executor_client import (
    EvaluationError,
    ExecutionResult,
    ExecutorClient,
    ExecutorClientError,
    InvalidRequest,
    Limits,
    ModulesMissing,
    NotFoundError,
    PreconditionError,
    Recorder,
    ReentrantExecution,
    Rollback,
    Session,
    SessionState,
    Tool,
    VariablesState,
)
from executor_client._core import missing_modules
from executor_client._core.limits import NAME_RACES_MAX
from executor_client._core.local import LocalPath
from executor_client._core.session_base import is_id
from executor_client._core.status import is_session_gone
from executor_client.smolagents.session_request import SessionRequest, beginnings_of, module_of, refuse_beginnings

_log = logging.getLogger(__name__)

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class SessionReplaced(Exception):
    """The session no longer existed and was replaced by a new one; `reason` is the daemon's message."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class _Contents:
    """The contents that each session gets in addition to those of the agent's code."""

    tools: dict[str, Tool] | None = None
    tool_modules: tuple[str, ...] = ()
    """Modules of shipped tools that a session lacked."""
    variables: dict[str, Any] = field(default_factory=dict)


class SessionLease:
    """Owns the session, and the client if it was created here. Used by one thread at a time, except for `close`.

    `existing`, a session, an id or a name, belongs to the caller: it is neither ended nor replaced. If no session has
    this name, one is created.
    """

    def __init__(
        self,
        connect: Callable[[], ExecutorClient],
        *,
        owns_client: bool,
        request: SessionRequest,
        existing: Session | str | None = None,
        record: LocalPath | Recorder | None = None,
    ) -> None:
        """Raises ValueError for an existing session with arguments for a new one."""
        self._name = existing if isinstance(existing, str) and not is_id(existing) else None
        if existing is not None and self._name is None:
            refuse_beginnings(request)
        self._connect = connect
        self._owns_client = owns_client
        self._request = request
        self._existing = existing
        self._record = record
        self._recorder = record if isinstance(record, Recorder) else None
        self._lock = threading.RLock()
        self._client: ExecutorClient | None = None
        self._session: Session | None = None
        self._generation = 0
        self._limits = Limits()
        self._contents = _Contents()
        self._warned: set[str] = set()
        self._has_run = False  # True once the agent's code has run in the current session

    @property
    def variable_names(self) -> tuple[str, ...]:
        """The names of the variables that a new or restarted interpreter gets."""
        return tuple(self._contents.variables)

    @property
    def limits(self) -> Limits:
        """The limits in force; empty before the first session."""
        return self._limits

    @property
    def owns_session(self) -> bool:
        """True if this object creates its sessions, so it also ends and replaces them."""
        return self._existing is None

    @property
    def current(self) -> Session | None:
        """The session, or None if none was created yet."""
        return self._session

    def record_to(self, path: LocalPath) -> None:
        """Records all sessions from now on. To be called before the first one."""
        self._record = path

    def replay(self, connect: Callable[[], ExecutorClient]) -> None:
        """Takes sessions from another client, and records none. To be called before the first one."""
        self._connect, self._record, self._recorder = connect, None, None

    def recorder(self) -> Recorder | None:
        """Returns the recorder of all sessions until `close`; None without `record`. Raises OSError."""
        with self._lock:
            if self._recorder is None and self._record is not None and not isinstance(self._record, Recorder):
                self._recorder = Recorder(self._record)
            return self._recorder

    def session(self) -> Session:
        """Returns the session, and creates it if there is none."""
        with self._lock:
            if self._session is None:
                self._session = self._begin()
            return self._session

    def _begin(self) -> Session:
        with ExitStack() as on_failure:
            if isinstance(self._existing, Session):
                session = self._existing
            else:
                if self._client is None:
                    self._client = self._connect()
                if self._name is not None:
                    session = self._named(self._client, self._name, on_failure)
                elif self._existing is not None:
                    session = self._client.get_session(self._existing)
                else:
                    session = self._request.make(self._client, self._contents.tool_modules)
                    on_failure.enter_context(session)
                    self._require_modules(self._client, session)
            if (recorder := self.recorder()) is not None:
                session.record(recorder)
            if self._contents.tools is not None:
                session.register_tools(self._contents.tools)
            if self._contents.variables:
                session.set_variables(dict(self._contents.variables))
            on_failure.pop_all()
        self._generation = session.generation
        self._limits = session.limits
        self._has_run = False
        self._warned.clear()
        return session

    def _named(self, client: ExecutorClient, name: str, on_failure: ExitStack) -> Session:
        """Returns the session with this name, or creates it. Logs how an existing one differs."""
        for _ in range(NAME_RACES_MAX):
            with suppress(NotFoundError):
                session = client.get_session(name=name)
                if session.info.state is not SessionState.LOST:
                    self._log_differences(session, name)
                    return session
            try:
                session = self._request.make(client, self._contents.tool_modules, name)
            except PreconditionError as error:
                if error.reason != "NAME_TAKEN":  # else another client was faster
                    raise
            else:
                on_failure.enter_context(session)
                self._require_modules(client, session)
                return session
        raise PreconditionError(f"other clients keep creating and ending session {name!r}", reason="NAME_TAKEN")

    def _log_differences(self, session: Session, name: str) -> None:
        if given := beginnings_of(self._request):
            _log.warning("session %r already exists; %s only applies to a new session", name, ", ".join(given))
        authorized = set(session.info.authorized_imports)
        if session.info.workspace_imports:
            authorized.update(self._request.own_modules)
        missing = [each for each in self._request.authorized_imports if not authorized & {each, "*"}]
        if missing:
            _log.warning("session %r already exists and does not authorize %s", name, ", ".join(missing))

    def _require_modules(self, client: ExecutorClient, session: Session) -> None:
        """Raises InterpreterError for authorized modules that the image and the workspace lack, like smolagents' local
        executor. If modules of the workspace need authorization, later steps may write them."""
        info = session.info
        missing = missing_modules.asked_for(info, self._request.authorized_imports)
        if missing:
            there = {module_of(file.path) for file in session.files.list().files}
            missing = tuple(module for module in missing if module not in there)
        if missing and info.workspace_imports:
            images: tuple[str, ...] = ()
            with suppress(ExecutorClientError):  # the images are only a suggestion
                images = client.get_policy().images
            raise InterpreterError(missing_modules.refusal(info, missing, images))

    def _remake_with(self, modules: Iterable[str]) -> bool:
        """Ends an unused session that lacks modules of its tools, so that the next one gets packages with them. Returns
        False if the policy adds no packages."""
        client, session = self._client, self._session
        if client is None or session is None or not self.owns_session or self._has_run or self._contents.tool_modules:
            return False
        if not client.get_policy().packages.auto:
            return False
        self._contents.tool_modules = tuple(modules)
        with self._lock:
            self._session = None
        session.close()
        return True

    def set_variables(self, variables: Mapping[str, Any]) -> None:
        """Sets variables now and in every later interpreter. Raises `SessionReplaced` if a new session got them."""

        def put(session: Session) -> None:
            session.set_variables(dict(variables))
            self._contents.variables.update(variables)

        self._put(put)

    def register_tools(self, tools: dict[str, Tool]) -> None:
        """Replaces the tools now and in every later session. Raises `SessionReplaced` as `set_variables` does."""

        def put(session: Session) -> None:
            session.register_tools(tools)
            self._contents.tools = tools

        try:
            self._put(put)
        except ModulesMissing as missing:
            if not self._remake_with(missing.modules):
                raise
            self._put(put)

    def _put(self, put: Callable[[Session], None]) -> None:
        try:
            with self._replacing():
                put(self.session())
        except SessionReplaced:
            put(self.session())
            raise

    def execute(self, code: str, run: Callable[[Session], ExecutionResult]) -> ExecutionResult:
        """Runs code with `run`, and restores the variables if the interpreter was replaced.

        Raises `SessionReplaced`, after replacing the session, if it is gone and there is no result.
        """
        session = self.session()
        self._has_run = True
        with self._replacing():
            result = run(session)
        if result.state is VariablesState.LOST:
            if self.owns_session:
                self._replace()
        elif result.state is VariablesState.ROLLED_BACK:
            self._generation = result.generation  # the savepoint has the variables of the task
        elif result.generation != self._generation:
            try:
                self._restore_variables(session, result.generation)
            except SessionReplaced:
                # The session ended after the execution and was replaced: its files are lost as well.
                return replace(result, state=VariablesState.LOST)
        return result

    def evaluate(self, expression: str, timeout_s: float | None) -> Any:
        """Returns the value of an expression in the current session; creates and replaces none.

        Raises EvaluationError for every failure except an InvalidRequest, which is the caller's mistake.
        """
        session = self._session
        if session is None:
            raise EvaluationError("there is no session: no code has run yet, or its session has ended")
        try:
            return session.evaluate(expression, timeout_s=timeout_s)
        except (EvaluationError, InvalidRequest):
            raise
        except ExecutorClientError as error:
            raise EvaluationError(f"the session can't evaluate it: {error}", reason=error.reason) from error

    def variables(self, names: Iterable[str] | None) -> dict[str, Any]:
        """Returns variables of the current session; without `names`, all that hold data. Empty without a session.

        Raises EvaluationError as `evaluate` does. Waits for running code.
        """
        session = self._session
        if session is None:
            return {}
        try:
            return session.get_variables(names)
        except (InvalidRequest, ReentrantExecution):
            raise
        except ExecutorClientError as error:
            raise EvaluationError(f"the session's variables can't be read: {error}", reason=error.reason) from error

    def restore(self) -> bool:
        """Restores the variables if the interpreter was replaced between two steps. Returns True if so.

        Only the result of an evaluation reported the replacement, which the agent does not see. Raises
        `SessionReplaced`, after replacing the session, if the session is gone.
        """
        session = self._session
        if session is None or session.generation == self._generation:
            return False
        self._restore_variables(session, session.generation)
        return True

    def _restore_variables(self, session: Session, generation: int) -> None:
        self._generation = generation
        if self._contents.variables:
            with self._replacing():
                session.set_variables(dict(self._contents.variables))

    def roll_back(self, savepoint: int) -> Rollback:
        """Rolls the session back to a savepoint, including the variables of the task. Raises SessionReplaced."""
        with self._replacing():
            done = self.session().rollback(savepoint)
        self._generation = done.generation
        return done

    def note_warning(self, limit: str) -> bool:
        """Returns True for the session's first warning of the limit."""
        first = limit not in self._warned
        self._warned.add(limit)
        return first

    def close(self) -> None:
        """Deletes the session and closes the client. Idempotent, also before the first use."""
        with self._lock:
            session, self._session = self._session, None
            client, self._client = self._client, None
            self._contents = _Contents()
        try:
            if session is not None and self.owns_session:
                session.close()
        finally:
            if client is not None and self._owns_client:
                client.close()
            if self._recorder is not None and self._recorder is not self._record:
                self._recorder.close()
                self._recorder = None

    def abandon(self) -> None:
        """Forgets a session whose daemon does not answer, so that `close` does not wait for it."""
        with self._lock:
            self._session = None

    @contextmanager
    def _replacing(self) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, PreconditionError) as error:
            if not (is_session_gone(error) and self.owns_session):
                raise
            self._replace()
            raise SessionReplaced(error.message) from error

    def _replace(self) -> None:
        with self._lock:
            gone, self._session = self._session, None
            if gone is not None:
                gone.close()  # a lost session counts against the quota until it is deleted
            self.session()


def weakly(method: Callable[_Given, _Made]) -> Callable[_Given, _Made | None]:
    """Returns a callable with a weak reference to an executor's method; it does nothing once the executor is gone.

    The executor's client and session must not keep it alive, because they end with it.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made | None:
        bound = reference()
        return None if bound is None else bound(*args, **kwargs)

    return call
