"""The session of one executor: made at first use, given back at the end, replaced when it is gone.

Promises: everything that belongs in the session (the prelude, the tools, the variables of the task) is put into each
new one and, after the interpreter was replaced, back into the old one. A replacement is never silent: the caller is
told why the session had to be replaced, and tells the model. A session of the caller's own is never replaced.
"""

from __future__ import annotations

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
    NotFoundError,
    PreconditionError,
    ReentrantExecution,
    Session,
    SessionInfo,
    Tool,
    VariablesState,
    _missing_modules,
)
from executor_client._status import is_session_gone
from executor_client.smolagents.files import StartFile

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")

# Names that smolagents' local executor offers without an import and CPython does not have as builtins.
PRELUDE = """\
from math import acos, asin, atan, atan2, ceil, cos, degrees, exp, floor, log, radians, sin, sqrt, tan
"""


class SessionGone(Exception):
    """The session did not exist any more. A new one stands in its place; `reason` says what the daemon said."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class SessionRequest:
    """What is asked of the daemon for each session."""

    image: str | None
    authorized_imports: tuple[str, ...]
    limits: Mapping[str, Any]
    prelude: str = ""
    """Runs after our own, whenever that does."""
    backend: str | None = None
    labels: Mapping[str, str] | None = None
    state: bytes | None = None
    files: tuple[StartFile, ...] = ()
    """The workspace of each session begins with these."""

    def make(self, client: ExecutorClient) -> Session:
        with ExitStack() as on_failure:
            session = on_failure.enter_context(
                client.create_session(
                    image=self.image,
                    authorized_imports=self.authorized_imports,
                    limits=self.limits or None,
                    labels=self.labels,
                    prelude=PRELUDE + self.prelude,
                    backend=self.backend,
                    state=self.state,
                )
            )
            for file in self.files:
                file.put(session)
            on_failure.pop_all()
        return session


def refuse_beginnings(request: SessionRequest) -> None:
    """Raises ValueError for what is said of a new session where one is gone on in that there is."""
    names = ("image", "limits", "prelude", "backend", "labels", "state", "files")
    given = [name for name in names if getattr(request, name)]
    if given:
        raise ValueError(f"session= goes on in a session that there is; {', '.join(given)} can be of a new one only")


@dataclass
class _Contents:
    """What a session must hold besides what the agent's code makes."""

    tools: dict[str, Tool] | None = None
    variables: dict[str, Any] = field(default_factory=dict)


class SessionLease:
    """Owns the session, and the client when it made it. Used by one thread at a time, except for `close`.

    `existing`, a session or the id of one, is the caller's: it is used as it is, neither ended nor replaced.
    """

    def __init__(
        self,
        connect: Callable[[], ExecutorClient],
        *,
        owns_client: bool,
        request: SessionRequest,
        existing: Session | str | None = None,
    ) -> None:
        self._connect = connect
        self._owns_client = owns_client
        self._request = request
        self._existing = existing
        self._lock = threading.RLock()
        self._client: ExecutorClient | None = None
        self._session: Session | None = None
        self._generation = 0
        self._limits = Limits()
        self._contents = _Contents()
        self._warned: set[str] = set()

    @property
    def variable_names(self) -> tuple[str, ...]:
        """The variables that a new or restarted interpreter is given."""
        return tuple(self._contents.variables)

    @property
    def limits(self) -> Limits:
        """The limits in force, as far as a session has told them."""
        return self._limits

    @property
    def owns_session(self) -> bool:
        """True when sessions are made here, and so are ended and replaced here."""
        return self._existing is None

    @property
    def current(self) -> Session | None:
        """The session, if there is one."""
        return self._session

    def session(self) -> Session:
        """The session, made now if there is none."""
        with self._lock:
            if self._session is None:
                self._session = self._begun()
            return self._session

    def _begun(self) -> Session:
        with ExitStack() as on_failure:
            if isinstance(self._existing, Session):
                session = self._existing
            else:
                if self._client is None:
                    self._client = self._connect()
                if self._existing is not None:
                    session = self._client.get_session(self._existing)
                else:
                    session = on_failure.enter_context(self._request.make(self._client))
                    self._require_modules(self._client, session.info)
            if self._contents.tools is not None:
                session.register_tools(self._contents.tools)
            if self._contents.variables:
                session.set_variables(dict(self._contents.variables))
            on_failure.pop_all()
        self._generation = session.generation
        self._limits = session.limits
        self._warned.clear()
        return session

    def _require_modules(self, client: ExecutorClient, info: SessionInfo) -> None:
        """As smolagents' local executor does when it is made, refuses imports that could only fail."""
        missing = _missing_modules.asked_for(info, self._request.authorized_imports)
        if missing:
            images: tuple[str, ...] = ()
            with suppress(ExecutorClientError):  # the message is as true without them
                images = client.get_policy().images
            raise InterpreterError(_missing_modules.refusal(info, missing, images))

    def set_variables(self, variables: Mapping[str, Any]) -> None:
        """Sets variables, now and in every interpreter to come. Raises `SessionGone` when that was in a new session."""

        def put(session: Session) -> None:
            session.set_variables(dict(variables))
            self._contents.variables.update(variables)

        self._put(put)

    def register_tools(self, tools: dict[str, Tool]) -> None:
        """Replaces the host tools, now and in every session to come. Raises `SessionGone` as `set_variables` does."""

        def put(session: Session) -> None:
            session.register_tools(tools)
            self._contents.tools = tools

        self._put(put)

    def _put(self, put: Callable[[Session], None]) -> None:
        try:
            with self._replacing():
                put(self.session())
        except SessionGone:
            put(self.session())
            raise

    def execute(self, code: str, run: Callable[[Session], ExecutionResult]) -> ExecutionResult:
        """Runs code by `run`, and puts the variables back if the interpreter was replaced meanwhile.

        Raises `SessionGone`, after having replaced the session, when it is gone and there is no result.
        """
        session = self.session()
        with self._replacing():
            result = run(session)
        if result.state is VariablesState.LOST:
            if self.owns_session:
                self._replace()
        elif result.generation != self._generation:
            try:
                self._put_back_variables(session, result.generation)
            except SessionGone:
                return replace(result, state=VariablesState.LOST)  # since then, and replaced: its files are gone too
        return result

    def evaluate(self, expression: str, timeout_s: float | None) -> Any:
        """The value of an expression in the session that there is; makes none, and replaces none.

        Raises EvaluationError whatever goes wrong, but for an InvalidRequest, which is the caller's own mistake.
        """
        session = self._session
        if session is None:
            raise EvaluationError("there is no session: no code has run yet, or its session has come to its end")
        try:
            return session.evaluate(expression, timeout_s=timeout_s)
        except (EvaluationError, InvalidRequest):
            raise
        except ExecutorClientError as error:
            raise EvaluationError(f"the session cannot evaluate it: {error}", reason=error.reason) from error

    def variables(self, names: Iterable[str] | None) -> dict[str, Any]:
        """Variables of the session that there is, those of data without names; of none, none.

        Raises EvaluationError as `evaluate` does. Waits for the code that runs.
        """
        session = self._session
        if session is None:
            return {}
        try:
            return session.get_variables(names)
        except (InvalidRequest, ReentrantExecution):
            raise
        except ExecutorClientError as error:
            raise EvaluationError(f"the session gives no variables: {error}", reason=error.reason) from error

    def restore(self) -> bool:
        """Puts the variables back if the interpreter was replaced outside of any step; whether it was.

        The result that told of it was an evaluation's, and the agent has not seen that. Raises `SessionGone`, after
        having replaced the session, when that is gone meanwhile.
        """
        session = self._session
        if session is None or session.generation == self._generation:
            return False
        self._put_back_variables(session, session.generation)
        return True

    def _put_back_variables(self, session: Session, generation: int) -> None:
        self._generation = generation
        if self._contents.variables:
            with self._replacing():
                session.set_variables(dict(self._contents.variables))

    def note_warning(self, limit: str) -> bool:
        """Whether this is the session's first warning of the limit."""
        first = limit not in self._warned
        self._warned.add(limit)
        return first

    def close(self) -> None:
        """Deletes the session and closes the client. Idempotent, and safe when nothing was made yet."""
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

    def abandon(self) -> None:
        """Forgets a session whose daemon does not answer, so that `close` does not wait for it once more."""
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
            raise SessionGone(error.message) from error

    def _replace(self) -> None:
        with self._lock:
            gone, self._session = self._session, None
            if gone is not None:
                gone.close()  # a lost session counts until it is deleted
            self.session()


def weakly(method: Callable[_Given, _Made]) -> Callable[_Given, _Made | None]:
    """A method of an executor, for what its client and its session hold: they must not keep it, whose end is theirs.

    Does nothing once the executor is gone.
    """
    ours = weakref.WeakMethod(method)

    def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made | None:
        bound = ours()
        return None if bound is None else bound(*args, **kwargs)

    return call
