"""Turns what smolagents hands to an executor (tools, managed agents, plain callables) into host tools of a session.

The objects of the user are called, never changed: their names, parameters and descriptions are read, and what they
return is unwrapped. They run in the agent's own process, so what they hold (secrets, connections, other agents) stays
here, and only arguments and results travel. A managed agent that loses its own daemon raises `DaemonLost`, which is no
`Exception`: the client ends the execution for it, so this run stops as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from smolagents.agent_types import AgentType

from executor_client import Tool

FINAL_ANSWER = "final_answer"
"""The name by which smolagents knows the tool that ends a run, whatever its class."""

DESCRIPTION_CHARS_MAX = 4_000


def host_tools(tools: Mapping[str, Callable[..., Any]]) -> dict[str, Tool]:
    """A session's tools for these callables.

    They are declared without parameters, so that the sandbox passes on whatever the code calls them with, and the tool
    itself judges, as it does when smolagents calls it: some take one dict for all arguments, many have defaults.
    """
    return {
        name: Tool(_callable(tool), description=_description(tool), is_final_answer=name == FINAL_ANSWER)
        for name, tool in tools.items()
    }


def unwrapped(value: Any) -> Any:
    """The plain value inside smolagents' own AgentText, AgentImage and AgentAudio, which the sandbox does not know."""
    return value.to_raw() if isinstance(value, AgentType) else value


def _callable(tool: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return unwrapped(tool(*args, **kwargs))

    return call


def _description(tool: Callable[..., Any]) -> str:
    """What help() shows in the sandbox: the description and, for tools and managed agents, their inputs."""
    described = str(getattr(tool, "description", None) or inspect.getdoc(tool) or "")
    inputs = getattr(tool, "inputs", None)
    if isinstance(inputs, Mapping) and inputs:
        listed = "\n".join(
            f"    {name} ({about.get('type', 'any')}): {about.get('description', '')}" for name, about in inputs.items()
        )
        described = f"{described}\n\nArgs:\n{listed}"
    return described[:DESCRIPTION_CHARS_MAX]
