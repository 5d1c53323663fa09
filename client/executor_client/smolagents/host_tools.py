"""Turns what smolagents hands to an executor (tools, managed agents, plain callables) into host tools of a session.

The objects of the user are called, never changed: their names, parameters and descriptions are read, and what they
return is unwrapped. They run in the agent's own process, so what they hold (secrets, connections, other agents) stays
here, and only arguments and results travel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from smolagents.agent_types import AgentType

from executor_client import Tool
from executor_client.smolagents.failures import DaemonLost

FINAL_ANSWER = "final_answer"
"""The name by which smolagents knows the tool that ends a run, whatever its class."""

DESCRIPTION_CHARS_MAX = 4_000


def host_tools(tools: Mapping[str, Callable[..., Any]], on_lost: Callable[[DaemonLost], None]) -> dict[str, Tool]:
    """A session's tools for these callables. `on_lost` hears when a managed agent lost its own daemon."""
    return {
        name: Tool(
            _callable(tool, on_lost),
            description=_description(tool),
            parameters=_parameters(tool),
            is_final_answer=name == FINAL_ANSWER,
        )
        for name, tool in tools.items()
    }


def unwrapped(value: Any) -> Any:
    """The plain value inside smolagents' own AgentText, AgentImage and AgentAudio, which the sandbox does not know."""
    return value.to_raw() if isinstance(value, AgentType) else value


def _callable(tool: Callable[..., Any], on_lost: Callable[[DaemonLost], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return unwrapped(tool(*args, **kwargs))
        except DaemonLost as lost:
            # A managed agent's run was stopped. To the code in the sandbox that is one more tool error, which it, or
            # the model after it, could go on from; so the executor is told apart, and stops this run as well.
            on_lost(lost)
            raise RuntimeError(str(lost)) from lost

    return call


def _parameters(tool: Callable[..., Any]) -> tuple[str, ...]:
    inputs = getattr(tool, "inputs", None)
    if isinstance(inputs, Mapping):
        return tuple(str(name) for name in inputs)
    try:
        parameters = inspect.signature(tool).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(p.name for p in parameters) if all(p.kind in named for p in parameters) else ()


def _description(tool: Callable[..., Any]) -> str:
    described = getattr(tool, "description", None) or inspect.getdoc(tool) or ""
    return str(described)[:DESCRIPTION_CHARS_MAX]
