"""Ships tools into a sandbox: a tool becomes the text of a module that recreates it.

    shipped = ship("price", tool, python="3.12")

Owns the analysis of a tool and the text. It must not know sessions, the wire or smolagents: a library's tools are
described by a `Dialect`, which the library's integration passes in.

Theory of operation. The tool is an object, and everything that it refers to is followed. The user's functions and
classes become their own source, objects of Python or of an installed package become imports, data becomes bindings, and
other objects are recreated step by step, each after the objects that it needs. An object that can't be shipped (a lock,
a connection, an open file) is recorded under the user's name for it, and the search goes on, so that a refusal lists
all of them.

A tool never silently becomes a different one. So source is used only if it compiles to exactly the code that runs here,
and a name that is not defined here is refused. If nothing but source is missing, the whole tool is sent as bytecode, to
the same minor version of Python only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from executor_api.limits import CODE_BYTES_MAX, TOOL_MODULES_MAX, TOOLS_SHIPPED_BYTES_MAX
from executor_api.values import EncodeError
from executor_client._core.values import pack, pack_by_value
from executor_client._shipping.dialects import Dialect
from executor_client._shipping.objects import Objects
from executor_client._shipping.owners import Owner, owner_of, users_modules
from executor_client._shipping.source import compiled
from executor_client._shipping.writer import PREFIX, Problem, StandIn, Writer
from executor_client.errors import ToolNotShippable

_ENTRY = f"{PREFIX}tool"


@dataclass(frozen=True)
class Shipped:
    """A tool in the form for a sandbox: either `text`, with `entry` and packed `bindings`, or a packed `value`."""

    text: str = ""
    entry: str = ""
    bindings: bytes | None = None
    value: bytes | None = None
    modules: tuple[str, ...] = field(default=())


def ship(
    name: str,
    tool: object,
    *,
    python: str,
    dialect: Dialect | None = None,
    others: Mapping[str, object] | None = None,
) -> Shipped:
    """Returns a tool in the form for a sandbox that runs this version of Python ("3.12" or "3.12.4").

    If it uses another tool of the session, one of `others`, the sandbox calls that tool, wherever it runs. So the state
    of a host tool stays out of the sandbox, and a shipped tool is not there twice.

    Raises ToolNotShippable, which lists every obstacle.
    """
    writer = Writer()
    used = dialect or Dialect()
    tools = {id(each): other for other, each in (others or {}).items() if each is not tool and other != name}
    objects = Objects(writer, used, tools)
    try:
        writer.say(f"{_ENTRY} = {objects.ref(tool, 'self')}")
        objects.finish()
    except RecursionError:
        raise ToolNotShippable(name, ["what it uses is nested too deeply to be followed"]) from None
    if not writer.problems:
        return _packed(name, writer)
    if used.carries_bytecode and all(problem.lacks_source for problem in writer.problems):
        return _pickled(name, tool, writer, python)
    raise ToolNotShippable(name, [str(problem) for problem in writer.problems])


def _packed(name: str, writer: Writer) -> Shipped:
    text = writer.text(name)
    problems = []
    try:
        compiled(text)
    except (SyntaxError, ValueError) as error:
        problems.append(f"its source can't be put together: {error}")
    if len(text.encode("utf-8", "surrogatepass")) > CODE_BYTES_MAX:
        problems.append(f"its source has more than {CODE_BYTES_MAX} bytes")
    if len(writer.modules) > TOOL_MODULES_MAX:
        problems.append(f"it needs more than {TOOL_MODULES_MAX} modules")
    bindings = None
    try:
        bindings = pack(dict(writer.bindings)) if writer.bindings else None
    except EncodeError as error:
        problems.append(f"its data can't be sent: {error}")
    if bindings is not None and len(bindings) > TOOLS_SHIPPED_BYTES_MAX:
        problems.append(f"its data has more than {TOOLS_SHIPPED_BYTES_MAX} bytes")
    if problems:
        raise ToolNotShippable(name, problems)
    return Shipped(text, _ENTRY, bindings, modules=tuple(writer.modules))


def _pickled(name: str, tool: object, writer: Writer, python: str) -> Shipped:
    here = "{}.{}".format(*sys.version_info[:2])
    problems = [str(problem) for problem in writer.problems]
    if ".".join(python.split(".")[:2]) != here:
        difference = f"bytecode can't be sent instead: Python is {here} here and {python or 'unknown'} in the sandbox"
        raise ToolNotShippable(name, [*problems, difference])
    try:
        return Shipped(value=pack_by_value(tool, users_modules()))
    except EncodeError as error:
        raise ToolNotShippable(name, [*problems, f"nor can it be pickled: {error}"]) from error


__all__ = ["Dialect", "Owner", "Problem", "Shipped", "StandIn", "owner_of", "ship"]
