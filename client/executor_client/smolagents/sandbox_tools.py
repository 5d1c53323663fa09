"""Decides which of an agent's tools run in the sandbox, and ships smolagents' tools there.

The sandbox has no smolagents. A tool is shipped with its class, methods and state, on a small base class of ours that
calls it like smolagents. Objects that can't leave this process are refused by name: other agents, models, and tools
that only forward calls.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import smolagents
from smolagents import Tool as SmolagentsTool
from smolagents.agent_types import AgentType
from smolagents.agents import MultiStepAgent
from smolagents.default_tools import UserInputTool
from smolagents.models import Model
from smolagents.tools import BaseTool, PipelineTool

from executor_client._shipping import Dialect, Owner, StandIn, owner_of

HOST = "host"
SANDBOX = "sandbox"
ALL = "*"
"""The key of a placement mapping for all other tools."""

Placement = str | Mapping[str, str]

FINAL_ANSWER = "final_answer"
"""smolagents' name for the tool that ends a run."""

_WRAPPERS = {
    "SpaceToolWrapper": "calls a Space",
    "GradioToolWrapper": "holds a tool of Gradio",
    "LangChainToolWrapper": "holds a tool of LangChain",
}

_TEXT = '''\
import abc as _shipped_abc


class _shipped_Tool(_shipped_abc.ABC):
    """Calls a tool as smolagents does."""

    inputs = {}
    is_initialized = False

    def __init__(self, *args, **kwargs):
        self.is_initialized = False

    def forward(self, *args, **kwargs):
        raise NotImplementedError("Write this method in your subclass of `Tool`.")

    def setup(self):
        self.is_initialized = True

    def __call__(self, *args, sanitize_inputs_outputs=False, **kwargs):
        if not self.is_initialized:
            self.setup()
        if len(args) == 1 and len(kwargs) == 0 and isinstance(args[0], dict):
            if all(key in self.inputs for key in args[0]):
                args, kwargs = (), args[0]
        return self.forward(*args, **kwargs)


_shipped_Tool.__name__ = _shipped_Tool.__qualname__ = "Tool"


def _shipped_function_tool(function, attributes):
    """A tool that `@tool` made of a function."""
    made = type("SimpleTool", (_shipped_Tool,), dict(attributes, forward=staticmethod(function)))
    return made.__new__(made)

'''
_TOOL = StandIn("_shipped_Tool", _TEXT)
_FUNCTION_TOOL = StandIn("_shipped_function_tool", _TEXT)


def checked(placement: Placement) -> str | dict[str, str]:
    """Returns the placement. Raises ValueError for an unknown one."""
    given = {ALL: placement} if isinstance(placement, str) else dict(placement)
    for name, where in given.items():
        if where not in (HOST, SANDBOX):
            which = "is" if name == ALL else f"of {name!r} is"
            raise ValueError(f"tool_placement {which} {where!r}; supported is: {HOST}, {SANDBOX}")
    return placement if isinstance(placement, str) else given


def placement_of(name: str, tool: object, placement: Placement) -> str:
    """Returns the placement of a tool. A host-only tool runs on the host, unless the placement names it."""
    if isinstance(placement, str):
        placement = {ALL: placement}
    if name in placement:
        return placement[name]
    return HOST if host_only(name, tool) is not None else placement.get(ALL, HOST)


def host_only(name: str, tool: object) -> str | None:
    """Returns why a tool can only run in this process; None if it may run in the sandbox."""
    if name == FINAL_ANSWER:
        return "it gives the final answer, which is recorded in this process"
    if isinstance(tool, PipelineTool):
        return "it holds a model that is loaded in this process"
    if isinstance(tool, UserInputTool):
        return "it asks the person at this process's terminal"
    if isinstance(tool, MultiStepAgent):
        return "it is an agent, whose model and tools are in this process"
    if isinstance(tool, Model):
        return "it is a model, which is called from this process"
    if inspect.iscoroutinefunction(getattr(tool, "forward", tool)):
        return "it is asynchronous, and is awaited in this process"
    because = getattr(type(tool), "host_only_because", None)
    if isinstance(because, str):
        return because
    kind = type(tool)
    if kind.__module__ == "smolagents.tools" and kind.__name__ in _WRAPPERS:
        return f"it {_WRAPPERS[kind.__name__]}, and only passes calls on"
    if kind.__module__.partition(".")[0] == "mcpadapt" or kind.__name__ == "MCPAdaptTool":
        return "it calls an MCP server, whose connection is in this process"
    return None


class SmolagentsDialect(Dialect):
    """Ships smolagents' tools."""

    carries_bytecode = False

    def __init__(self, tool: object) -> None:
        # The sandbox can't import a package that defines tools, because it imports smolagents: ship its source.
        classes = [each for each in type(tool).__mro__ if issubclass(each, BaseTool)]
        modules = [each.__module__ for each in classes]
        function = _function_of(tool)
        if isinstance(function, types.FunctionType):
            modules.append(str(getattr(inspect.unwrap(function), "__globals__", {}).get("__name__")))
        self._packages = {module.partition(".")[0] for module in modules if owner_of(module) is not Owner.PYTHON}
        self._packages.add("smolagents")

    def stand_in(self, value: object) -> StandIn | None:
        return _TOOL if value is SmolagentsTool or value is BaseTool else None

    def reduced(self, value: object) -> tuple[Any, ...] | None:
        function = _function_of(value)
        if function is None:
            return None
        names = ("name", "description", "inputs", "output_type", "output_schema")
        attributes = {name: vars(type(value))[name] for name in names if name in vars(type(value))}
        return _FUNCTION_TOOL, (function, attributes), dict(vars(value))

    def refusal(self, value: object) -> str | None:
        if isinstance(value, type):
            if issubclass(value, AgentType):
                return "is a type of smolagents; use the plain value"
            return "is smolagents' own and stays in this process" if issubclass(value, MultiStepAgent | Model) else None
        return host_only("", value)

    def ships_module(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def drops_decorator(self, decorator: object) -> bool:
        return decorator is smolagents.tool

    def is_machinery(self, function: object) -> bool:
        return isinstance(function, types.FunctionType) and function.__code__.co_qualname.startswith(
            "validate_after_init.<locals>."
        )


def _function_of(tool: object) -> object | None:
    """Returns the function that `@tool` made this tool from; None for other tools."""
    kind = type(tool)
    if kind.__name__ != "SimpleTool" or kind.__module__ != "smolagents.tools":
        return None
    return getattr(vars(kind)["forward"].__func__, "__wrapped__", None)
