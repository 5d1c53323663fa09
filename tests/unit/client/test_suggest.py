"""A wrong name is answered with the right one, wherever it was given."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from executor_client import AsyncExecutorClient, ExecutorClient, InvalidRequest, Limits, Session, TlsConfig
from executor_client._core.suggest import names_arguments
from executor_client.smolagents import CodeAgent, RemoteExecutor, RemotePythonInterpreterTool
from tests.support.agents import scripted

ADDRESS = "unix:/nowhere"


def client(**options: Any) -> ExecutorClient:
    return ExecutorClient(ADDRESS, token="t", **options)


def agent(**options: Any) -> CodeAgent:
    return CodeAgent(tools=[], model=scripted(), **options)


def session(**options: Any) -> Session:
    return client().create_session(**options)


@pytest.mark.parametrize(
    ("call", "given", "said"),
    [
        (client, {"adress": "x"}, "ExecutorClient() has no argument 'adress': did you mean address=?"),
        (client, {"url": "x"}, "ExecutorClient() has no argument 'url': did you mean address=?"),
        (AsyncExecutorClient, {"tken": "x"}, "AsyncExecutorClient() has no argument 'tken': did you mean token=?"),
        (session, {"import": []}, "create_session() has no argument 'import': did you mean authorized_imports=?"),
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
            "CodeAgent() has no argument 'limits': it is the executor's, executor_kwargs={'limits': ...}",
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
        names_arguments(lambda code: code)()  # type: ignore[call-arg]


def test_without_smolagents_it_is_said_what_to_install() -> None:
    program = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "smolagents":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import executor_client.smolagents
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "ModuleNotFoundError executor_client.smolagents needs smolagents, which is not installed here: "
        "pip install 'remote-executor[smolagents]'\n"
    )
