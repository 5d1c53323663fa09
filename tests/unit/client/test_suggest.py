"""A wrong name is answered with the right one, wherever it was given."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import Any, cast

import numpy
import pytest

import executor_client
from executor_client import (
    AsyncExecutorClient,
    ExecutorClient,
    InvalidRequest,
    Limits,
    Session,
    SessionFiles,
    SessionProcesses,
    TlsConfig,
)
from executor_client._core.arguments import checks_arguments
from executor_client.smolagents import CodeAgent, RemoteExecutor, RemotePythonInterpreterTool
from tests.support.agents import scripted

ADDRESS = "unix:/nowhere"
# As callers without a type checker see them.
CLIENT: Any = ExecutorClient
LIMITS: Any = Limits
REMOTE: Any = RemoteExecutor
SESSION, FILES, PROCESSES = (cast("Any", object.__new__(kind)) for kind in (Session, SessionFiles, SessionProcesses))


def client(**options: Any) -> ExecutorClient:
    return ExecutorClient(ADDRESS, token="t", **options)


def agent(**options: Any) -> CodeAgent:
    return CodeAgent(tools=[], model=scripted(), **options)


def session(**options: Any) -> Session:
    return client().create_session(**options)


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (client, {"url": "x"}, "ExecutorClient() has no argument 'url': did you mean address=?"),
        (AsyncExecutorClient, {"tken": "x"}, "AsyncExecutorClient() has no argument 'tken': did you mean token=?"),
        (session, {"imports": []}, "create_session() has no argument 'imports': did you mean authorized_imports=?"),
        (
            session,
            {"timeout": 3},
            "create_session() has no argument 'timeout': did you mean limits={'wall_time_s': ...}?",
        ),
        (Limits, {"wall_time": 3}, "Limits() has no argument 'wall_time': did you mean wall_time_s=?"),
        (TlsConfig, {"zzz": 1}, "TlsConfig() has no argument 'zzz': there are ca, cert, key"),
        (RemoteExecutor, {"adress": "x"}, "RemoteExecutor() has no argument 'adress': did you mean address=?"),
        (
            RemoteExecutor,
            {"authorized_imports": []},
            "RemoteExecutor() has no argument 'authorized_imports': did you mean additional_authorized_imports=?",
        ),
        (
            RemotePythonInterpreterTool,
            {"lables": {}},
            "RemoteExecutor() has no argument 'lables': did you mean labels=?",
        ),
        (
            agent,
            {"executor_kwargs": {"timeout_seconds": 3}},
            "RemoteExecutor() has no argument 'timeout_seconds': did you mean limits={'wall_time_s': ...}?",
        ),
        (
            agent,
            {"limits": {}},
            "CodeAgent() has no argument 'limits'; pass it to the executor: executor_kwargs={'limits': ...}",
        ),
        (agent, {"max_step": 3}, "CodeAgent() has no argument 'max_step': did you mean max_steps=?"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_one(
    call: Callable[..., object], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError) as raised:
        call(**given)
    assert str(raised.value) == said


async def test_a_wrong_argument_of_a_coroutine_is_answered_too() -> None:
    with pytest.raises(TypeError, match=r"create_session\(\) has no argument 'lables': did you mean labels=\?"):
        await AsyncExecutorClient(ADDRESS, token="t").create_session(lables={})  # type: ignore[call-arg]


class Unprintable:
    """An object of the caller's own, which may stand in for one of ours."""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: SESSION.execute(42), 'execute(): code is of type int; write code="..."'),
        (
            lambda: SESSION.execute("1", on_event=3),
            "execute(): on_event is of type int; write on_event=a function",
        ),
        (
            lambda: SESSION.evaluate("1", timeout_s="3"),
            "evaluate(): timeout_s is of type str; write timeout_s=1.5",
        ),
        (
            lambda: SESSION.get_variables("x"),
            'get_variables(): names is of type str; write names=["..."]',
        ),
        (
            lambda: SESSION.get_variables([1]),
            'names is of type list and holds int; write names=["..."]',
        ),
        (lambda: SESSION.set_variables([1]), 'write variables={"...": ...}'),
        (lambda: FILES.write("a", 5), "write(): data is of type int; write data="),
        (
            lambda: PROCESSES.run(5),
            'run(): command is of type int; write command="..." or ["..."]',
        ),
        (
            lambda: session(env={"A": "geheim", "B": 1}),
            'env is of type dict and holds int, str; write env={"...": "..."}',
        ),
        (lambda: session(limits=5), 'limits is of type int; write limits=Limits(...) or {"...": '),
        (lambda: session(detached="no"), "create_session(): detached is of type str; write detached=True"),
        (lambda: CLIENT(50051), 'ExecutorClient(): address is of type int; write address="..."'),
        (lambda: client(tls="yes"), "ExecutorClient(): tls is of type str; write tls=TlsConfig(...) or True"),
        (lambda: LIMITS(wall_time_s="30"), "Limits(): wall_time_s is of type str; write wall_time_s=1.5"),
        (
            lambda: REMOTE(session=42),
            'RemoteExecutor(): session is of type int; write session=Session(...) or "..."',
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_at_the_door_with_what_to_write(
    call: Callable[[], object], said: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        call()
    assert said in str(raised.value)
    assert "geheim" not in str(raised.value)


async def test_a_value_of_a_wrong_type_is_refused_in_the_asyncio_client_too() -> None:
    with pytest.raises(InvalidRequest, match=r"get_session\(\): name is of type int"):
        await AsyncExecutorClient(ADDRESS, token="t").get_session(name=7)  # type: ignore[arg-type]


def test_values_that_only_look_different_are_taken() -> None:
    assert LIMITS(wall_time_s=1, operations=numpy.int64(3), cpu_time_s=numpy.float32(0.5)).wall_time_s == 1
    client(connect_timeout_s=numpy.float64(1)).close()
    REMOTE(client=Unprintable(), limits={"memory_bytes": "1GB", "wall_time_s": None})


def test_the_types_of_every_public_call_can_be_resolved() -> None:
    """A name that is imported for type checkers only would leave the call unchecked, or fail it."""
    kinds = [RemoteExecutor, *(getattr(executor_client, name) for name in executor_client.__all__)]
    members = [member for kind in kinds for member in getattr(kind, "__dict__", {}).values()]
    checked = [member for member in members if inspect.isfunction(member) and hasattr(member, "__wrapped__")]
    assert len(checked) > 100
    for member in checked:
        typing.get_type_hints(member)


def test_a_wrong_limit_is_answered_with_the_right_one() -> None:
    with pytest.raises(
        InvalidRequest, match=r"no such limits: memory \(did you mean memory_bytes\?\)\. There are wall"
    ):
        client().create_session(limits={"memory": 1})


def test_a_decorated_function_is_what_it_was() -> None:
    assert list(inspect.signature(Session.execute).parameters)[:2] == ["self", "code"]
    assert inspect.iscoroutinefunction(AsyncExecutorClient.create_session)
    assert Limits(wall_time_s=1) == Limits(wall_time_s=1) != Limits()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        checks_arguments(lambda code: code)()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("package", "module", "message"),
    [
        (
            "smolagents",
            "smolagents",
            "executor_client.smolagents needs smolagents, which is not installed here: "
            "pip install 'remote-executor[smolagents]'",
        ),
        (
            "agents",
            "integrations.openai_agents",
            "No module named 'agents': pip install 'remote-executor[openai-agents]'",
        ),
    ],
)
def test_without_a_framework_it_is_said_what_to_install(package: str, module: str, message: str) -> None:
    program = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import executor_client.{module}
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"ModuleNotFoundError {message}\n"
