"""How an agent comes to a `RemoteExecutor`, and how a saved one comes back to it.

Three ways: the `CodeAgent` here (no change to smolagents), `register()` (plain `smolagents.CodeAgent` then takes
`executor_type="remote"`), or `executor=RemoteExecutor()` (smolagents 1.23 and later).

No released smolagents lets a third party add an executor type, and 1.22 checks the type in `__init__`. So an agent is
built as "local" up to the one method that makes its executor, which makes ours; then it says "remote" again.

Saving: smolagents writes `executor_type`, and "local" for an agent that was given an `executor=`. Loaded again, such an
agent would run its code in this process. `name_executor_when_saved` mends that: whatever holds a `RemoteExecutor` is
saved as "remote", which our class and registered smolagents load, and plain smolagents refuses.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import smolagents
from smolagents import agents as smolagents_agents

from executor_client.smolagents.executor import RemoteExecutor

EXECUTOR_TYPE = "remote"

_UPSTREAM_INIT = smolagents.CodeAgent.__init__
_UPSTREAM_CREATE = smolagents.CodeAgent.create_python_executor
_UPSTREAM_TO_DICT = smolagents.CodeAgent.to_dict


class RemoteCodeAgent(smolagents.CodeAgent):  # type: ignore[misc]  # smolagents is untyped
    """smolagents' `CodeAgent` with `executor_type="remote"`, its default here. Managed agents are allowed.

    `executor_kwargs` are those of `RemoteExecutor`. Its own name (not "CodeAgent") is what a saved agent refers to, so
    that one managed by another agent is loaded by this class again and not by smolagents' own.
    """

    def __init__(self, *args: Any, executor_type: str = EXECUTOR_TYPE, **kwargs: Any) -> None:
        _init(super().__init__, self, args, {**kwargs, "executor_type": executor_type})

    def create_python_executor(self) -> Any:
        return _create(super().create_python_executor, self)

    def save(self, output_dir: str | Path, relative_path: str | None = None) -> None:
        super().save(output_dir, relative_path)
        # smolagents' template imports each agent class from smolagents itself.
        app = Path(output_dir) / "app.py"
        text = app.read_text(encoding="utf-8")
        name = type(self).__name__
        ours = f"from {type(self).__module__.removesuffix('.agent')} import {name}\nfrom smolagents import GradioUI, "
        app.write_text(text.replace(f"from smolagents import GradioUI, {name}, ", ours, 1), encoding="utf-8")


def register() -> None:
    """Makes plain `smolagents.CodeAgent(executor_type="remote")` work, for the whole process. Idempotent."""

    @functools.wraps(_UPSTREAM_INIT)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _init(functools.partial(_UPSTREAM_INIT, self), self, args, kwargs)

    @functools.wraps(_UPSTREAM_CREATE)
    def create_python_executor(self: Any) -> Any:
        return _create(functools.partial(_UPSTREAM_CREATE, self), self)

    if smolagents.CodeAgent.__init__ is _UPSTREAM_INIT:
        smolagents.CodeAgent.__init__ = init
        smolagents.CodeAgent.create_python_executor = create_python_executor


def unregister() -> None:
    """Undoes `register()`. Agents that were made meanwhile keep their executors. Idempotent."""
    smolagents.CodeAgent.__init__ = _UPSTREAM_INIT
    smolagents.CodeAgent.create_python_executor = _UPSTREAM_CREATE


def name_executor_when_saved() -> None:
    """Makes any `CodeAgent` that holds a `RemoteExecutor` say so when it is saved. Idempotent."""

    @functools.wraps(_UPSTREAM_TO_DICT)
    def to_dict(self: Any) -> dict[str, Any]:
        saved: dict[str, Any] = _UPSTREAM_TO_DICT(self)
        executor = self.python_executor
        if isinstance(executor, RemoteExecutor):
            saved["executor_type"] = EXECUTOR_TYPE
            saved["executor_kwargs"] = executor.saved_kwargs()
            imports = {*saved["authorized_imports"], *executor.additional_authorized_imports}
            saved["authorized_imports"] = sorted(imports)
            saved["requirements"] = sorted({*saved["requirements"], "remote-executor[smolagents]"})
        return saved

    if smolagents.CodeAgent.to_dict is _UPSTREAM_TO_DICT:
        smolagents.CodeAgent.to_dict = to_dict


def find_managed_agents_by_class() -> None:
    """Lets smolagents load a saved agent that manages a `RemoteCodeAgent`: it looks classes up by name."""
    registry = getattr(smolagents_agents, "AGENT_REGISTRY", None)
    if registry is not None:
        registry[RemoteCodeAgent.__name__] = RemoteCodeAgent
    else:  # before 1.25 it takes them from its module
        setattr(smolagents_agents, RemoteCodeAgent.__name__, RemoteCodeAgent)


# ---------------------------------------------------------------------------------------------------------------------
# The detour by "local", for our class and for the registered one


def _init(upstream: Any, agent: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = inspect.signature(upstream).bind_partial(*args, **kwargs)
    remote = call.arguments.get("executor_type") == EXECUTOR_TYPE
    # RemoteCodeAgent comes here twice when smolagents is registered too: the second time as "local".
    agent._makes_remote_executor = remote or getattr(agent, "_makes_remote_executor", False)
    if remote:
        call.arguments["executor_type"] = "local"
    upstream(*call.args, **call.kwargs)
    if remote:
        agent.executor_type = EXECUTOR_TYPE


def _create(upstream: Any, agent: Any) -> Any:
    if not getattr(agent, "_makes_remote_executor", False):
        return upstream()
    settings = {"max_print_outputs_length": agent.max_print_outputs_length, **agent.executor_kwargs}
    return RemoteExecutor(agent.additional_authorized_imports, agent.logger, **settings)
