"""The executors that the table of features compares, each used through a `CodeAgent` as a person would."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import docker.errors
import smolagents
from smolagents import LogLevel
from smolagents.remote_executors import DockerExecutor

from executor_client.smolagents import CodeAgent, RemotePythonInterpreterTool
from tests.features.actor import Actor
from tests.support.agents import mend_final_answer
from tests.support.daemon import Daemon
from tests.support.free_ports import free_port

COLUMNS = ("local", "docker", "ours_local", "ours_docker", "ours_e2b")
"""The names of all places."""


class Place(ABC):
    """The place where an agent's code runs. `name` is its column."""

    name: str
    time_limit: ClassVar[str | None] = None
    """The executor's own setting for the seconds that a step may take."""
    attempts: ClassVar[int] = 1
    """Attempts that a probe has on it to be as expected."""

    @contextmanager
    def agent(self, *script: Any, own: bool = False, **options: Any) -> Iterator[Any]:
        """An agent with these replies and as many steps.

        Its executor is as new, or as good as that, unless it is to be its `own`: made by the agent, as its user has it.
        """
        options = {"tools": [], "max_steps": len(script), "verbosity_level": LogLevel.OFF, **options}
        with ExitStack() as stack:
            yield self._made(stack, own, model=Actor.of(*script), **options)

    @abstractmethod
    def _made(self, stack: ExitStack, own: bool, **options: Any) -> Any:
        """The agent; what ends it goes on the stack."""

    @abstractmethod
    def loaded(self, folder: Path) -> Any:
        """A saved agent, as its user loads it."""

    def interpreter_tool(self, stack: ExitStack, imports: list[str]) -> Any:
        """The tool by which an agent that calls tools runs code: smolagents has one for all its executors."""
        return smolagents.PythonInterpreterTool(authorized_imports=imports)

    def read(self, agent: Any, name: str) -> Any:
        """The value of a variable that a caller or a callback gets between steps."""
        return agent.python_executor(name).output

    def quiet(self) -> AbstractContextManager[None]:
        """Warnings are errors in tests, but for those of smolagents' own executors, which are not ours to mend."""
        return unwarned()


class Local(Place):
    """smolagents' `LocalPythonExecutor`, in the agent's process."""

    name = "local"
    time_limit = "timeout_seconds"

    def _made(self, stack: ExitStack, own: bool, **options: Any) -> Any:
        return smolagents.CodeAgent(**options)

    def loaded(self, folder: Path) -> Any:
        return smolagents.CodeAgent.from_folder(str(folder))


class Docker(Place):
    """smolagents' `DockerExecutor`. Agents share one container, where they can."""

    name = "docker"
    # It connects to its kernel again for each step, and misses what that says before the connection is open: the more
    # often, the busier the machine.
    attempts = 8

    def __init__(self, kwargs: dict[str, Any], executor: DockerExecutor) -> None:
        self._kwargs = kwargs
        self._shared = executor

    def _made(self, stack: ExitStack, own: bool, **options: Any) -> Any:
        stack.callback(mend_final_answer)
        kwargs = {**self._kwargs, **options.pop("executor_kwargs", {})}
        options = {"executor_type": "docker", "executor_kwargs": kwargs, **options}
        if not own:
            return smolagents.CodeAgent(executor=self._shared, **options)
        agent = smolagents.CodeAgent(**options)
        stack.callback(ended, agent.python_executor)
        return agent

    def own_container(self, **settings: Any) -> dict[str, Any]:
        """The options of an agent whose own container has these settings of Docker's."""
        settings = {**self._kwargs["container_run_kwargs"], **settings}
        return {"executor_kwargs": {"port": free_port(), "container_run_kwargs": settings}}

    def loaded(self, folder: Path) -> Any:
        return smolagents.CodeAgent.from_folder(str(folder), executor_kwargs=self._kwargs)


def ended(executor: DockerExecutor) -> None:
    """Kills the container: its own end waits for ten seconds, since the first process ignores SIGTERM."""
    with suppress(docker.errors.APIError):  # it may have ended
        executor.container.kill()
    executor.cleanup()
    executor.client.close()


class Ours(Place):
    """`executor_client.smolagents.CodeAgent` on a daemon."""

    def __init__(self, name: str, daemon: Daemon) -> None:
        self.name = name
        self._access = daemon.access

    def _made(self, stack: ExitStack, own: bool, **options: Any) -> Any:
        kwargs = {**self._access, **options.pop("executor_kwargs", {})}
        return stack.enter_context(CodeAgent(executor_kwargs=kwargs, **options))

    def loaded(self, folder: Path) -> Any:
        return CodeAgent.from_folder(str(folder), executor_kwargs=self._access)

    def interpreter_tool(self, stack: ExitStack, imports: list[str]) -> Any:
        return stack.enter_context(RemotePythonInterpreterTool(authorized_imports=imports, **self._access))

    def read(self, agent: Any, name: str) -> Any:
        return agent.python_executor.evaluate(name)

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def unwarned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
