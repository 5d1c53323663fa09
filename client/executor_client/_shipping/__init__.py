"""Ships tools into a sandbox: a tool becomes the text of a module that makes it again.

    shipped = ship("price", tool, python="3.12")

Theory of operation. The tool is an object. Whatever it leads to is followed: functions and classes of the user's become
their own source, what Python or an installed package has becomes an import, data becomes bindings, and other objects
are made again step by step, in an order in which each finds what it needs. What can't follow (a lock, a connection, an
open file) is noted under the name that the user knows it by, and the search goes on, so that a refusal names all of it.

A tool is never shipped as something that is silently different. So source counts only when it compiles to the very code
that runs here, and a name that is not defined here is refused. Where only source is lacking, the whole tool is carried
as bytecode, to the same minor version of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from executor_api.values import EncodeError
from executor_client._shipping.classes import Classes
from executor_client._shipping.definitions import Definitions
from executor_client._shipping.dialects import Dialect
from executor_client._shipping.functions import Functions
from executor_client._shipping.objects import Objects
from executor_client._shipping.source import compiled
from executor_client._shipping.writer import PREFIX, Problem, StandIn, Writer
from executor_client._values import pack, pack_by_value
from executor_client.errors import ToolNotShippable

TEXT_BYTES_MAX = 1 << 20
BINDINGS_BYTES_MAX = 32 << 20
MODULES_MAX = 256

_ENTRY = f"{PREFIX}tool"


@dataclass(frozen=True)
class Shipped:
    """A tool on its way into a sandbox: either `text`, with `entry` and packed `bindings`, or a packed `value`."""

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
    """Puts a tool together for a sandbox that runs this version of Python ("3.12" or "3.12.4").

    Where it uses another tool of the session, one of `others`, that one is called, wherever it runs: what a host tool
    holds does not go into the sandbox, and what a shipped one has is not there twice.

    Raises ToolNotShippable, which names everything that stands in the way.
    """
    writer = Writer()
    used = dialect or Dialect()
    definitions = Definitions(writer, used)
    definitions.functions = Functions(definitions)
    definitions.classes = Classes(definitions)
    definitions.objects = Objects(writer, used, definitions)
    for other, its_object in (others or {}).items():
        if its_object is not tool and other != name:
            definitions.objects.know_tool(its_object, other)
    try:
        writer.say(f"{_ENTRY} = {definitions.objects.ref(tool, 'self')}")
        definitions.finish()
    except RecursionError:
        raise ToolNotShippable(name, ["what it uses is nested too deeply to be followed"]) from None
    if not writer.problems:
        return _packed(name, writer)
    if used.carries_bytecode and all(problem.lacks_source for problem in writer.problems):
        return _pickled(name, tool, definitions, python)
    raise ToolNotShippable(name, [str(problem) for problem in writer.problems])


def _packed(name: str, writer: Writer) -> Shipped:
    text = writer.text(name)
    problems = []
    try:
        compiled(text)
    except (SyntaxError, ValueError) as error:
        problems.append(f"its source can't be put together: {error}")
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES_MAX:
        problems.append(f"its source has more than {TEXT_BYTES_MAX} bytes")
    if len(writer.modules) > MODULES_MAX:
        problems.append(f"it needs more than {MODULES_MAX} modules")
    bindings = None
    try:
        bindings = pack(dict(writer.bindings)) if writer.bindings else None
    except EncodeError as error:
        problems.append(f"its data can't be sent: {error}")
    if bindings is not None and len(bindings) > BINDINGS_BYTES_MAX:
        problems.append(f"its data has more than {BINDINGS_BYTES_MAX} bytes")
    if problems:
        raise ToolNotShippable(name, problems)
    return Shipped(text, _ENTRY, bindings, modules=tuple(writer.modules))


def _pickled(name: str, tool: object, definitions: Definitions, python: str) -> Shipped:
    here = "{}.{}".format(*sys.version_info[:2])
    problems = [str(problem) for problem in definitions.writer.problems]
    if ".".join(python.split(".")[:2]) != here:
        difference = f"bytecode can't be sent instead: Python is {here} here and {python or 'unknown'} in the sandbox"
        raise ToolNotShippable(name, [*problems, difference])
    try:
        return Shipped(value=pack_by_value(tool, definitions.users_modules()))
    except EncodeError as error:
        raise ToolNotShippable(name, [*problems, f"nor can it be pickled: {error}"]) from error


__all__ = ["Dialect", "Problem", "Shipped", "StandIn", "ship"]
