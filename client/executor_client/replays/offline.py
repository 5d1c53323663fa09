"""A session that a recording answers: nothing runs, and no daemon is needed. Checks that it is used as recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_client._core import requests
from executor_client._core import tools as host_tools
from executor_client._core.assembler import Assembler, ToolRequest
from executor_client._core.convert import LIMIT_NAMES
from executor_client._core.tools import Tool
from executor_client._core.values import unpack_or_opaque
from executor_client._sync import ClientLease, OnEvent, Transport
from executor_client.errors import InvalidRequest, RecordingError
from executor_client.recording import Entry, Recording, Step
from executor_client.replays.comparison import Diverged, differing
from executor_client.results import ExecutionResult, Limits, PolicyRef, SessionInfo, SessionState
from executor_client.session import Session


class RecordedClient:
    """Stands for an `ExecutorClient`: its sessions are those of a recording, in order."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._items = recording.in_order()

    def create_session(self, *args: Any, **kwargs: Any) -> Session:
        """Returns the next recorded session; the arguments have no effect. Raises Diverged if there is none."""
        for item in self._items:
            if isinstance(item, Entry) and item.kind == "session":
                return RecordedSession(self._recording, self._items, _info(item.fields))
        raise Diverged.of(0, "the sessions", "no further session", "a new session")

    def close(self) -> None:
        pass


class _NoTransport(Transport):
    def __init__(self) -> None:
        """Connects to nothing."""


class _NoLease(ClientLease):
    def __init__(self) -> None:
        """Holds nothing."""


class RecordedSession(Session):
    """Answers executions from a recording. Raises Diverged for other code, tools or variables than the recorded ones.

    Raises InvalidRequest for calls that a recording can't answer: files, processes, ports, variables, savepoints.
    """

    def __init__(self, recording: Recording, items: Iterator[Entry | Step], info: SessionInfo) -> None:
        super().__init__(_NoTransport(), info, _NoLease(), max_concurrent_tools=1)
        self._recording = recording
        self._items = items

    def register_tools(self, tools: Mapping[str, Callable[..., Any] | Tool]) -> None:
        made = host_tools.as_tools(tools)
        entry = self._next("the tools", sorted(made))
        if not (isinstance(entry, Entry) and entry.kind == "tools"):
            raise Diverged.of(0, "the tools", _text(entry), sorted(made))
        recorded = {each.name: _described(each) for each in entry.message().tools}
        given = {each.name: _described(each) for each in requests.register_tools("", made).tools}
        if found := differing(0, "the tools", sorted(recorded), sorted(given)):
            raise Diverged(found)
        for name, description in recorded.items():
            if found := differing(0, f"the tool {name}", description, given[name]):
                raise Diverged(found)

    def set_variables(self, variables: Mapping[str, object]) -> None:
        packed = requests.pack_variables(variables)
        if not packed:
            return
        entry = self._next("the variables", sorted(packed))
        if not (isinstance(entry, Entry) and entry.kind == "variables"):
            raise Diverged.of(0, "the variables", _text(entry), sorted(packed))
        payload = self._recording.payload
        recorded = {each.name: unpack_or_opaque(payload(each.value.packed)) for each in entry.message().variables}
        given = {name: unpack_or_opaque(each) for name, each in packed.items()}
        if found := differing(0, "the variables", recorded, given):
            raise Diverged(found)

    def _execute(
        self, request: service_pb.ExecuteRequest, tools: Mapping[str, Tool], on_event: OnEvent | None
    ) -> ExecutionResult:
        step = self._next("the code", request.code)
        if not isinstance(step, Step):
            raise Diverged.of(0, "the session", _text(step), f"the code {request.code!r}")
        if found := differing(step.number, "the code", step.request.code, request.code):
            raise Diverged(found)
        assembler = Assembler(request.execution_id)
        assembler.final_answers = self._recording.final_answers(step)
        for event in self._recording.events(step):
            fed = assembler.feed(event)
            shown = fed.event if isinstance(fed, ToolRequest) else fed
            if shown is not None and on_event is not None:
                on_event(shown)
        if assembler.result is None:
            raise RecordingError(f"{self._recording.path} can't answer step {step.number}: its end is missing")
        self._generation = assembler.result.generation
        return assembler.result

    def close(self) -> None:
        self._closed = True

    def cancel(self, execution_id: str | None = None) -> None:
        """Does nothing: no execution takes time."""

    def _next(self, what: str, got: Any) -> Entry | Step:
        """Returns the next step, tools or variables."""
        for item in self._items:
            if isinstance(item, Step) or item.kind in ("tools", "variables", "session"):
                return item
        raise Diverged.of(0, what, "nothing further", got)

    def _open(self) -> NoReturn:
        raise InvalidRequest("a recording can't answer this: it only has executions, tools and variables")


def _described(spec: Any) -> dict[str, Any]:
    return {
        "description": spec.description,
        "parameters": [*spec.parameters],
        "gives the final answer": spec.is_final_answer,
    }


def _text(item: Entry | Step) -> str:
    return f"step {item.number}" if isinstance(item, Step) else f"{item.kind} of the session"


def _info(head: Mapping[str, Any]) -> SessionInfo:
    """Returns the recorded description of a session. Raises RecordingError."""
    try:
        return SessionInfo(
            session_id=str(head["session_id"]),
            state=SessionState(head["state"]),
            generation=int(head["generation"]),
            backend=str(head["backend"]),
            image=str(head["image"]),
            limits=Limits(**{name: head["limits"].get(name) for name in LIMIT_NAMES}),
            authorized_imports=tuple(map(str, head["authorized_imports"])),
            python_version=str(head["python_version"]),
            create_time=datetime.fromisoformat(head["create_time"]),
            expire_time=datetime.fromisoformat(head["expire_time"]),
            warm=bool(head["warm"]),
            labels={},
            policy=PolicyRef(**{name: str(head["policy"][name]) for name in ("profile", "version", "fingerprint")}),
            workspace_imports=bool(head["workspace_imports"]),
            missing_modules=tuple(map(str, head["missing_modules"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"the recording can't be used: its session is not described: {error!r}") from error
