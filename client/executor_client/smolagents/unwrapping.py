"""Plain values out of smolagents' own: AgentText, AgentImage and AgentAudio, in which it wraps answers and results.

The sandbox does not know these classes. They come back to it on their own, as the answer of an agent that is given to
the next one, and inside of lists and dicts, as the answers of several.
"""

from __future__ import annotations

from typing import Any

from smolagents.agent_types import AgentType

DEPTH_MAX = 200
"""Of containers inside each other; what is deeper is not carried by the codec either."""

_CONTAINERS = (list, tuple, dict, set, frozenset)


def unwrapped(value: Any) -> Any:
    """The value with plain ones in the place of smolagents' own, at any depth of builtin containers.

    Nothing of the caller's is changed: where there is something to unwrap, containers are made anew, with what is
    shared or contains itself as it was; else the value itself is given back.
    """
    if isinstance(value, AgentType):
        return value.to_raw()
    if type(value) in _CONTAINERS and _holds_wrapped(value):
        return _remade(value, {}, DEPTH_MAX)
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


def _remade(value: Any, made: dict[int, Any], depth_left: int) -> Any:
    if isinstance(value, AgentType):
        return value.to_raw()
    kind = type(value)
    if kind not in _CONTAINERS or not depth_left:
        return value
    if id(value) in made:
        return made[id(value)]
    if kind is list:
        new_list: list[Any] = made.setdefault(id(value), [])  # before its items, which may hold it
        new_list.extend(_remade(item, made, depth_left - 1) for item in value)
        return new_list
    if kind is dict:
        new_dict: dict[Any, Any] = made.setdefault(id(value), {})
        for key, item in value.items():
            new_dict[_remade(key, made, depth_left - 1)] = _remade(item, made, depth_left - 1)
        return new_dict
    return made.setdefault(id(value), kind(_remade(item, made, depth_left - 1) for item in value))
