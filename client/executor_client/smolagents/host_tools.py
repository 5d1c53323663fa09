"""Turns what smolagents hands to an executor (tools, managed agents, plain callables) into tools of a session.

The objects of the user are called, never changed: their names, parameters and descriptions are read, and what they
return is unwrapped. Those placed on the host run in the agent's own process, so what they hold (secrets, connections,
other agents) stays here, and only arguments and results travel. A managed agent that loses its own daemon raises
`DaemonLost`, which is no `Exception`: the client ends the execution for it, so this run stops as well.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from executor_client import Tool, ToolNotShippable
from executor_client.smolagents.sandbox_tools import (
    ALL,
    SANDBOX,
    Placement,
    SmolagentsDialect,
    host_only,
    placement_of,
)
from executor_client.smolagents.unwrapping import unwrapped

_log = logging.getLogger(__name__)

FINAL_ANSWER = "final_answer"
"""The name by which smolagents knows the tool that ends a run, whatever its class."""

DESCRIPTION_CHARS_MAX = 4_000


def placed_tools(
    tools: Mapping[str, Callable[..., Any]], placement: Placement, fetched: Callable[[Any], Any]
) -> dict[str, Tool]:
    """A session's tools for these callables, each where the placement says. Raises ToolNotShippable.

    `fetched` turns a final answer that comes from the sandbox into what the caller gets.

    Those on the host are declared without parameters, so that the sandbox passes on whatever the code calls them with,
    and the tool itself judges, as it does when smolagents calls it: some take one dict for all arguments, many have
    defaults.
    """
    _warn_of_unknown(placement, tools)
    made = {}
    for name, tool in tools.items():
        if placement_of(name, tool, placement) == SANDBOX:
            reason = host_only(name, tool)
            if reason is not None:
                raise ToolNotShippable(name, [reason])
            made[name] = Tool(
                tool, description=_description(tool), placement="sandbox", dialect=SmolagentsDialect(tool)
            )
        else:
            host = _FinalAnswer(tool, fetched) if name == FINAL_ANSWER else _HostTool(tool)
            made[name] = Tool(host, description=_description(tool), is_final_answer=name == FINAL_ANSWER)
    return made


def _warn_of_unknown(placement: Placement, tools: Mapping[str, Any]) -> None:
    unknown = [] if isinstance(placement, str) else sorted(placement.keys() - tools.keys() - {ALL})
    if unknown:
        _log.warning("tool_placement names no tools of this run: %s", ", ".join(unknown))


class _HostTool:
    """Calls a tool for the sandbox. `stands_for` is what another tool knows it as."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        self.stands_for = tool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return unwrapped(self.stands_for(*args, **kwargs))


class _FinalAnswer(_HostTool):
    """Calls the tool that ends a run.

    What it hands on as it came is the sandbox's; what it made itself is this process's own, and a path is one of this
    machine's then.
    """

    def __init__(self, tool: Callable[..., Any], fetched: Callable[[Any], Any]) -> None:
        super().__init__(tool)
        self._fetched = fetched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().__call__(*args, **kwargs)
        given = (*args, *kwargs.values())
        return self._fetched(answer) if any(answer is each for each in given) else answer


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
