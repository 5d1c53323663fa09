"""Unwraps AgentText, AgentImage and AgentAudio, in which smolagents wraps answers and results, into plain values.

The sandbox does not know these classes. They reach it as an agent's answer that is passed to another agent, or inside
lists and dicts of several answers.
"""

from __future__ import annotations

from typing import Any

from smolagents.agent_types import AgentType

DEPTH_MAX = 200
"""Levels of nested containers; the limit of the codec."""

_CONTAINERS = (list, tuple, dict, set, frozenset)


def unwrapped(value: Any) -> Any:
    """Returns the value with smolagents' types replaced by plain ones, at any depth of builtin containers.

    The caller's objects are not changed: containers with something to unwrap are copied, and shared and cyclic parts
    stay so; otherwise the value itself is returned.
    """
    if isinstance(value, AgentType):
        return value.to_raw()
    if type(value) in _CONTAINERS and _holds_wrapped(value):
        return _copied(value, {}, DEPTH_MAX)
    return value


def _holds_wrapped(value: Any) -> bool:
    seen = {id(value)}
    waiting = [value]
    while waiting:
        for item in _items(waiting.pop()):
            if isinstance(item, AgentType):
                return True
            if type(item) in _CONTAINERS and id(item) not in seen:
                seen.add(id(item))
                waiting.append(item)
    return False


def _items(container: Any) -> Any:
    return (each for pair in container.items() for each in pair) if type(container) is dict else container


def _copied(value: Any, copies: dict[int, Any], depth_left: int) -> Any:
    if isinstance(value, AgentType):
        return value.to_raw()
    kind = type(value)
    if kind not in _CONTAINERS or not depth_left:
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind is list:
        new_list: list[Any] = copies.setdefault(id(value), [])  # before its items, which may hold it
        new_list.extend(_copied(item, copies, depth_left - 1) for item in value)
        return new_list
    if kind is dict:
        new_dict: dict[Any, Any] = copies.setdefault(id(value), {})
        for key, item in value.items():
            new_dict[_copied(key, copies, depth_left - 1)] = _copied(item, copies, depth_left - 1)
        return new_dict
    return copies.setdefault(id(value), kind(_copied(item, copies, depth_left - 1) for item in value))
