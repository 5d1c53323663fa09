"""Creates the `RemoteExecutor` of an agent, also when a saved agent is loaded.

An agent gets one in three ways: by the `CodeAgent` here (no change to smolagents), by `register()` (plain
`smolagents.CodeAgent` then accepts `executor_type="remote"`), or by `executor=RemoteExecutor()` (smolagents 1.23 and
later).

No released smolagents lets a third party add an executor type, and 1.22 checks the type in `__init__`. So an agent is
built as "local", with a replaced method to create its executor; then its type is set to "remote".

smolagents saves an agent with an `executor=` as "local". After loading, it would run its code in this process.
`name_executor_when_saved` prevents that: an agent with a `RemoteExecutor` is saved as "remote", which our class and
registered smolagents can load, and plain smolagents refuses.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import smolagents
from smolagents import agents as smolagents_agents
from smolagents.default_tools import TOOL_MAPPING, PythonInterpreterTool

from executor_client._core.suggest import named_parameters, unknown_name
from executor_client.smolagents.executor import RemoteExecutor
from executor_client.smolagents.failures import DaemonLost, StreamedDaemonLost
from executor_client.smolagents.interpreter_tool import RemotePythonInterpreterTool
from executor_client.smolagents.loaded_tools import remember_source
from executor_client.smolagents.recording import record_model
from executor_client.smolagents.uploads import with_uploads

EXECUTOR_TYPE = "remote"

_UPSTREAM_INIT = smolagents.CodeAgent.__init__
_UPSTREAM_RUN = smolagents.CodeAgent.run
_UPSTREAM_CREATE = smolagents.CodeAgent.create_python_executor
_UPSTREAM_TO_DICT = smolagents.CodeAgent.to_dict
_UPSTREAM_INTERRUPT = smolagents.MultiStepAgent.interrupt

# Settings that `smolagents.CodeAgent.from_dict` passes from a manager to the `from_dict` of each managed agent.
_EXECUTOR_SETTINGS = frozenset({"executor_type", "additional_authorized_imports", "max_print_outputs_length"})
_HANDED_DOWN = frozenset({"executor_type", "additional_authorized_imports"})
_NEVER_SAVED = ("token", "client")

_given_to_the_manager: ContextVar[dict[str, Any] | None] = ContextVar("_given_to_the_manager", default=None)


class RemoteCodeAgent(smolagents.CodeAgent):  # type: ignore[misc]  # smolagents is untyped
    """smolagents' `CodeAgent` with `executor_type="remote"` as the default. Managed agents are allowed.

    `executor_kwargs` are the arguments of `RemoteExecutor`. The class is not named "CodeAgent", because a saved agent
    names its class, and a managed agent must be loaded by this class, not by smolagents' class.
    """

    def __init__(self, *args: Any, executor_type: str = EXECUTOR_TYPE, **kwargs: Any) -> None:
        _check_names(kwargs)
        _init(super().__init__, self, args, {**kwargs, "executor_type": executor_type})

    def create_python_executor(self) -> Any:
        return _create(super().create_python_executor, self)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        result = _run(super().run, self, args, kwargs)
        return _streamed(result) if inspect.isgenerator(result) else result

    def save(self, output_dir: str | Path, relative_path: str | None = None) -> None:
        super().save(output_dir, relative_path)
        # smolagents' template imports each agent class from smolagents itself and omits the authorized imports.
        app = Path(output_dir) / "app.py"
        text = app.read_text(encoding="utf-8")
        name = type(self).__name__
        ours = f"from {type(self).__module__.removesuffix('.agent')} import {name}\nfrom smolagents import GradioUI, "
        text = text.replace(f"from smolagents import GradioUI, {name}, ", ours, 1)
        imports = f"    additional_authorized_imports={list(self.additional_authorized_imports)!r},\n"
        text = text.replace("    executor_type=", f"{imports}    executor_type=", 1)
        app.write_text(text, encoding="utf-8")

    @classmethod
    def from_dict(cls, agent_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Creates an agent, and the agents it manages, from the result of `to_dict`.

        The given `executor_kwargs` are added to the saved ones, also for managed agents of this class. (A token is
        never saved, so it must be given.) smolagents alone would replace all saved arguments, including limits, and
        give each managed agent the executor, arguments and imports of its manager.
        """
        given = kwargs.pop("executor_kwargs", None) or {}
        if agent_dict.get("executor_type") == EXECUTOR_TYPE:
            given = {**(_given_to_the_manager.get() or {}), **given}
        if kwargs.keys() >= _HANDED_DOWN:
            # The manager has smolagents' class: its executor type must not turn a sandbox into "local".
            kwargs = {name: value for name, value in kwargs.items() if name not in _EXECUTOR_SETTINGS}
            given = {name: given[name] for name in _NEVER_SAVED if name in given}
        managed = [_managed_from_dict(each, given, kwargs) for each in agent_dict["managed_agents"]]
        own = agent_dict.get("executor_kwargs") or {}
        agent = super().from_dict(
            {**agent_dict, "managed_agents": []},
            **{"managed_agents": managed, **kwargs, "executor_kwargs": {**own, **given}},
        )
        for saved in agent_dict["tools"]:
            if saved["name"] in agent.tools:
                remember_source(agent.tools[saved["name"]], saved["code"])
        return agent

    @classmethod
    def from_folder(cls, folder: str | Path, **kwargs: Any) -> Any:
        """Creates an agent and its managed agents from the files of `save`; `executor_kwargs` as in `from_dict`."""
        given = {**(_given_to_the_manager.get() or {}), **(kwargs.get("executor_kwargs") or {})}
        # smolagents passes no arguments when it loads managed agents from their folders.
        before = _given_to_the_manager.set(given)
        try:
            return super().from_folder(folder, **kwargs)
        finally:
            _given_to_the_manager.reset(before)


def register(*, base_tools: bool = False) -> None:
    """Makes plain `smolagents.CodeAgent(executor_type="remote")` work, for the whole process. Idempotent.

    With `base_tools`, `ToolCallingAgent(add_base_tools=True)` gets a `RemotePythonInterpreterTool` with default
    arguments; otherwise it gets smolagents' interpreter, which runs code in this process.
    """
    if base_tools:
        TOOL_MAPPING[RemotePythonInterpreterTool.name] = RemotePythonInterpreterTool

    @functools.wraps(_UPSTREAM_INIT)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _init(functools.partial(_UPSTREAM_INIT, self), self, args, kwargs)

    @functools.wraps(_UPSTREAM_CREATE)
    def create_python_executor(self: Any) -> Any:
        return _create(functools.partial(_UPSTREAM_CREATE, self), self)

    @functools.wraps(_UPSTREAM_RUN)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run(functools.partial(_UPSTREAM_RUN, self), self, args, kwargs)

    if smolagents.CodeAgent.__init__ is _UPSTREAM_INIT:
        smolagents.CodeAgent.__init__ = init
        smolagents.CodeAgent.run = run
        smolagents.CodeAgent.create_python_executor = create_python_executor


def unregister() -> None:
    """Undoes `register()`. Existing agents keep their executors. Idempotent."""
    smolagents.CodeAgent.__init__ = _UPSTREAM_INIT
    smolagents.CodeAgent.run = _UPSTREAM_RUN
    smolagents.CodeAgent.create_python_executor = _UPSTREAM_CREATE
    if TOOL_MAPPING.get(PythonInterpreterTool.name) is RemotePythonInterpreterTool:
        TOOL_MAPPING[PythonInterpreterTool.name] = PythonInterpreterTool


def name_executor_when_saved() -> None:
    """Makes smolagents save each `CodeAgent` with a `RemoteExecutor` as "remote". Idempotent."""

    @functools.wraps(_UPSTREAM_TO_DICT)
    def to_dict(self: Any) -> dict[str, Any]:
        saved: dict[str, Any] = _UPSTREAM_TO_DICT(self)
        executor = self.python_executor
        if isinstance(executor, RemoteExecutor):
            saved["executor_type"] = EXECUTOR_TYPE
            if type(self) is smolagents.CodeAgent:
                # As a managed agent, smolagents' class would give it its manager's executor, perhaps the local one.
                saved["class"] = RemoteCodeAgent.__name__
            saved["executor_kwargs"] = executor.saved_kwargs()
            imports = {*saved["authorized_imports"], *executor.additional_authorized_imports}
            saved["authorized_imports"] = sorted(imports)
            saved["requirements"] = sorted({*saved["requirements"], "remote-executor[smolagents]"})
        return saved

    if smolagents.CodeAgent.to_dict is _UPSTREAM_TO_DICT:
        smolagents.CodeAgent.to_dict = to_dict


def interrupt_running_steps() -> None:
    """Makes an agent's `interrupt()` end the running step and interrupt managed agents. Idempotent."""

    @functools.wraps(_UPSTREAM_INTERRUPT)
    def interrupt(self: Any) -> None:
        _UPSTREAM_INTERRUPT(self)
        executor = getattr(self, "python_executor", None)
        if isinstance(executor, RemoteExecutor):
            executor.interrupt()
        for managed in self.managed_agents.values():
            if isinstance(managed, smolagents.MultiStepAgent):
                managed.interrupt()

    if smolagents.MultiStepAgent.interrupt is _UPSTREAM_INTERRUPT:
        smolagents.MultiStepAgent.interrupt = interrupt


def find_managed_agents_by_class() -> None:
    """Lets smolagents find `RemoteCodeAgent` by name when it loads a saved agent."""
    _agent_classes()[RemoteCodeAgent.__name__] = RemoteCodeAgent


def _agent_classes() -> dict[str, Any]:
    """Returns the mapping where smolagents looks up classes of saved agents; before 1.25, its module's globals."""
    classes: dict[str, Any] = getattr(smolagents_agents, "AGENT_REGISTRY", vars(smolagents_agents))
    return classes


def _managed_from_dict(agent_dict: dict[str, Any], executor_kwargs: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """Creates a managed agent with its own settings; `executor_kwargs` are added if its executor is ours."""
    name = agent_dict["class"]
    found: Any = _agent_classes().get(name)
    is_agent: bool = isinstance(found, type) and issubclass(found, smolagents.MultiStepAgent)
    if not is_agent:
        raise ValueError(f"Unknown agent class {name!r}: import its module before loading the agent")
    if issubclass(found, RemoteCodeAgent) and agent_dict.get("executor_type") == EXECUTOR_TYPE:
        kwargs = {**kwargs, "executor_kwargs": executor_kwargs}
    return found.from_dict(agent_dict, **kwargs)


def _streamed(steps: Iterator[Any]) -> Iterator[Any]:
    """Yields the steps of a run. Raises `StreamedDaemonLost`, an `Exception`, in place of `DaemonLost`."""
    try:
        yield from steps
    except DaemonLost as lost:
        raise StreamedDaemonLost(str(lost)) from lost.__cause__


# ---------------------------------------------------------------------------------------------------------------------
# Building an agent as "local", for our class and for the registered one


def _check_names(kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError for an unknown argument; the message suggests the right place or name."""
    own = [*named_parameters(_UPSTREAM_INIT), *named_parameters(smolagents.MultiStepAgent.__init__)]
    for name in kwargs.keys() - own:
        if name in named_parameters(RemoteExecutor.__init__):
            raise TypeError(
                f"CodeAgent() has no argument {name!r}; pass it to the executor: executor_kwargs={{{name!r}: ...}}"
            )
        raise TypeError(f"CodeAgent() has no argument {name!r}: {unknown_name(name, own, form='{}=')}")


def _init(upstream: Any, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = inspect.signature(upstream).bind_partial(*args, **kwargs)
    remote = call.arguments.get("executor_type") == EXECUTOR_TYPE
    # After register(), RemoteCodeAgent gets here twice: the second time as "local".
    agent._makes_remote_executor = remote or getattr(agent, "_makes_remote_executor", False)
    if remote:
        call.arguments["executor_type"] = "local"
    upstream(*call.args, **call.kwargs)
    if remote:
        agent.executor_type = EXECUTOR_TYPE
    record_model(agent)


def _run(upstream: Any, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = inspect.signature(upstream).bind_partial(*args, **kwargs)
    given = call.arguments
    if given.get("images"):
        given["task"], given["images"] = with_uploads(agent, given["task"], given["images"])
    return upstream(*call.args, **call.kwargs)


def _create(upstream: Any, agent: Any) -> Any:
    if not getattr(agent, "_makes_remote_executor", False):
        return upstream()
    settings = {"max_print_outputs_length": agent.max_print_outputs_length, **agent.executor_kwargs}
    return RemoteExecutor(agent.additional_authorized_imports, agent.logger, **settings)
