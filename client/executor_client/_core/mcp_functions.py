"""Tools of MCP servers as functions of a session: names, signatures and docstrings from schemas, results as values.

The tool descriptions and results are the server's JSON, with wire names. A server may send anything.
"""

from __future__ import annotations

import base64
import binascii
import builtins
import inspect
import json
import keyword
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from executor_api.limits import TOOL_PARAMETERS_MAX
from executor_client._core.images import check_image
from executor_client._core.tools import Tool
from executor_client.errors import InvalidRequest

Json = Mapping[str, Any]
Call = Callable[[str, dict[str, Any]], Awaitable[Json]]
"""Calls a tool by its name in the server, and returns the result as JSON."""

NAME_CHARS_MAX = 128
DESCRIPTION_CHARS_MAX = 4_000
ERROR_CHARS_MAX = 10_000
ALTERNATIVES_MAX = 5

_REST = "arguments"
_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}


def functions(server: str, listed: list[Json], call: Call, prefix: str = "") -> dict[str, Tool]:
    """Returns the functions for a server's tools, by their names. Raises InvalidRequest if two get the same name."""
    made: dict[str, Tool] = {}
    for tool in listed:
        name = identifier(prefix + _text(tool.get("name"))[:NAME_CHARS_MAX])
        if hasattr(builtins, name):
            name += "_"  # a server must not replace print or open, and get their arguments
        if name in made:
            raise InvalidRequest(f"two tools of the MCP server {server!r} would be the function {name!r}")
        made[name] = _function(server, name, tool, call)
    return made


def identifier(name: str) -> str:
    """Returns the name as a Python identifier: "get-weather" is get_weather, "2fa" is _2fa, "from" is from_."""
    written = re.sub(r"\W", "_", name, flags=re.ASCII)
    if not written or written[0].isdecimal():
        written = f"_{written}"
    return f"{written}_" if keyword.iskeyword(written) else written


def _function(server: str, name: str, tool: Json, call: Call) -> Tool:
    signature, names = _signature(server, tool)
    returns = _object(tool.get("outputSchema"))
    is_wrapped = _object(returns.get("properties")).keys() == {"result"}
    tool_name = _text(tool.get("name"))

    async def call_tool(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        given = {names[each]: value for each, value in bound.items() if each in names} or bound.get(_REST, {})
        try:
            json.dumps(given, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"the arguments of {name} must be JSON values: {error}") from None
        return _value(await call(tool_name, given), is_wrapped=is_wrapped)

    if is_wrapped:
        returns = _object(_object(returns.get("properties")).get("result"))
    plain = all(
        each.default is each.empty and each.kind is not each.VAR_KEYWORD for each in signature.parameters.values()
    )
    parameters = tuple(signature.parameters) if plain and len(names) <= TOOL_PARAMETERS_MAX else ()
    return Tool(call_tool, _described(name, tool, signature, names, returns), parameters)


def _signature(server: str, tool: Json) -> tuple[inspect.Signature, dict[str, str]]:
    """Returns a tool's signature, and the schema's name of each parameter. A tool without any may take all keywords."""
    schema = _object(tool.get("inputSchema"))
    properties = _object(schema.get("properties"))
    required = schema.get("required")
    required = set(map(_text, required)) if isinstance(required, list) else set()
    names: dict[str, str] = {}
    parameters = []
    for own_name in sorted(properties, key=lambda each: each not in required):
        name = identifier(own_name)
        if name in names:
            raise InvalidRequest(
                f"the tool {_text(tool.get('name'))!r} of the MCP server {server!r} has two parameters {name!r}"
            )
        names[name] = own_name
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = inspect.Parameter.empty if own_name in required else _SERVERS_DEFAULT
        parameters.append(
            inspect.Parameter(name, kind, default=default, annotation=_Shown(_type(properties[own_name])))
        )
    if not properties and schema.get("additionalProperties", True) is not False:
        parameters.append(inspect.Parameter(_REST, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters), names


class _Shown:
    """Text in a signature, as `inspect.Signature` shows it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


_SERVERS_DEFAULT = _Shown("...")


def _type(schema: object, depth: int = 0) -> str:
    schema = _object(schema)
    if isinstance(values := schema.get("enum"), list) and values:
        shown = ", ".join(repr(each) for each in values[:ALTERNATIVES_MAX] if isinstance(each, str | int | None))
        return f"Literal[{shown[:200]}{', ...' if len(values) > ALTERNATIVES_MAX else ''}]"
    kind = schema.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        items = schema.get("items")
        return f"list[{_type(items, depth + 1)}]" if kind == "array" and items and depth < 2 else _TYPES[kind]
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kind, list):
        alternatives = [{"type": each} for each in kind]
    if isinstance(alternatives, list) and alternatives and depth < 2:
        return " | ".join(dict.fromkeys(_type(each, depth + 1) for each in alternatives[:ALTERNATIVES_MAX]))
    return "Any"


def _described(name: str, tool: Json, signature: inspect.Signature, names: dict[str, str], returns: Json) -> str:
    """Returns the docstring: the signature, and the server's descriptions of the tool and its parameters."""
    properties = _object(_object(tool.get("inputSchema")).get("properties"))
    lines = [f"{name}{signature}" + (f" -> {_type(returns)}" if returns else ""), "", _text(tool.get("description"))]
    about = {each: _text(_object(properties[own]).get("description")) for each, own in names.items()}
    if any(about.values()):
        lines += ["", "Args:", *(f"    {each}: {text}" for each, text in about.items() if text)]
    return "\n".join(lines).strip()[:DESCRIPTION_CHARS_MAX]


def _value(result: Json, *, is_wrapped: bool) -> Any:
    """Returns a result as a value. Raises RuntimeError with the text of an error result."""
    blocks = [_object(each) for each in _list(result.get("content"))]
    if result.get("isError"):
        text = "\n".join(_text(each.get("text")) for each in blocks if each.get("type") == "text")
        raise RuntimeError(text[:ERROR_CHARS_MAX] or "the tool failed without a message")
    structured = result.get("structuredContent")
    if structured is not None:
        return structured["result"] if is_wrapped and _object(structured).keys() == {"result"} else structured
    values = [_block_value(each) for each in blocks]
    if values and all(isinstance(each, str) for each in values):
        return "\n".join(values)
    return values if len(values) > 1 else values[0] if values else None


def _block_value(block: Json) -> Any:
    match block.get("type"):
        case "text":
            return _text(block.get("text"))
        case "image":
            image = check_image(_bytes(block.get("data")), _text(block.get("mimeType")), "mcp")
            if image.pil is None:
                raise RuntimeError(f"the tool's image can't be shown: {image.problem}")
            return image.pil
        case "audio":
            return _bytes(block.get("data"))
        case "resource":
            resource = _object(block.get("resource"))
            return _bytes(resource["blob"]) if "blob" in resource else _text(resource.get("text"))
        case "resource_link":
            return _text(block.get("uri"))
        case other:
            raise RuntimeError(f"the tool's result has content of an unknown type: {_text(other)[:100]!r}")


def _bytes(data: object) -> bytes:
    try:
        return base64.b64decode(_text(data), validate=True)
    except binascii.Error as error:
        raise RuntimeError(f"the tool's result has invalid base64: {error}") from None


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
