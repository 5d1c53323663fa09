"""Turns the tools, managed agents and plain callables of an agent into tools of a session.

The user's objects are called, never changed: their names, parameters and descriptions are read, and their results are
unwrapped. Host tools run in the agent's process: their secrets, connections and agents stay here, and only arguments
and results travel. If a managed agent loses its daemon, it raises `DaemonLost`, which is not an `Exception`: the client
ends the execution, so the managing run stops as well.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from executor_client import Tool, ToolNotShippable
from executor_client._core.tools import settled
from executor_client.smolagents.sandbox_tools import (
    ALL,
    FINAL_ANSWER,
    SANDBOX,
    Placement,
    SmolagentsDialect,
    host_only,
    placement_of,
)
from executor_client.smolagents.unwrapping import unwrapped

_log = logging.getLogger(__name__)

DESCRIPTION_CHARS_MAX = 4_000


def placed_tools(
    tools: Mapping[str, Callable[..., Any]], placement: Placement, fetch: Callable[[Any], Any]
) -> dict[str, Tool]:
    """Returns a session's tools for these callables, each at its placement. Raises ToolNotShippable.

    `fetch` converts a final answer from the sandbox to the value for the caller.

    Host tools are declared without parameters: the sandbox then passes all arguments, and the tool checks them, as with
    smolagents. Some tools take one dict for all arguments, many have defaults.
    """
    _warn_of_unknown(placement, tools)
    placed = {}
    for name, tool in tools.items():
        if placement_of(name, tool, placement) == SANDBOX:
            reason = host_only(name, tool)
            if reason is not None:
                raise ToolNotShippable(name, [reason])
            placed[name] = Tool(
                tool, description=_description(tool), placement="sandbox", dialect=SmolagentsDialect(tool)
            )
        else:
            host = _FinalAnswer(tool, fetch) if name == FINAL_ANSWER else _HostTool(tool)
            placed[name] = Tool(host, description=_description(tool), is_final_answer=name == FINAL_ANSWER)
    return placed


def _warn_of_unknown(placement: Placement, tools: Mapping[str, Any]) -> None:
    unknown = [] if isinstance(placement, str) else sorted(placement.keys() - tools.keys() - {ALL})
    if unknown:
        _log.warning("tool_placement names unknown tools: %s", ", ".join(unknown))


class _HostTool:
    """Calls a tool for the sandbox. `stands_for` is the object that other tools refer to."""

    def __init__(self, tool: Callable[..., Any]) -> None:
        self.stands_for = tool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return unwrapped(settled(self.stands_for(*args, **kwargs)))


class _FinalAnswer(_HostTool):
    """Calls the tool that ends a run.

    If the tool returns its argument unchanged, a path is from the sandbox, so it is in the workspace. If the tool made
    the answer, a path is local and is not fetched.
    """

    def __init__(self, tool: Callable[..., Any], fetch: Callable[[Any], Any]) -> None:
        super().__init__(tool)
        self._fetch = fetch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        answer = super().__call__(*args, **kwargs)
        given = (*args, *kwargs.values())
        return self._fetch(answer) if any(answer is each for each in given) else answer


def _description(tool: Callable[..., Any]) -> str:
    """Returns the text for help() in the sandbox: the description and, for tools and managed agents, the inputs."""
    described = str(getattr(tool, "description", None) or inspect.getdoc(tool) or "")
    inputs = getattr(tool, "inputs", None)
    if isinstance(inputs, Mapping) and inputs:
        listed = "\n".join(
            f"    {name} ({about.get('type', 'any')}): {about.get('description', '')}" for name, about in inputs.items()
        )
        described = f"{described}\n\nArgs:\n{listed}"
    return described[:DESCRIPTION_CHARS_MAX]
